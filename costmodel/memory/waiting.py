"""Gradients of values that a later block has read too: they wait for the block that made them."""

from collections.abc import Mapping, Sequence

from meshwright.costmodel.block.block import BlockCost
from meshwright.ir.graph.graph import Block, Graph


def last_readers(graph: Graph) -> Mapping[str, int]:
    """Value with a gradient -> position of the last block that reads it, where a block lies between
    that one and the one that made it."""
    made: dict[str, int] = {}
    found: dict[str, int] = {}
    for index, block in enumerate(graph.blocks):
        for name in block.inputs:
            if graph.tensors[name].requires_grad and index > made.get(name, 0) + 1:
                found[name] = index
        made |= dict.fromkeys(block.outputs, index)
    return found


def waiting_bytes(
    last: Mapping[str, int], begin: int, blocks: Sequence[Block], costs: Sequence[BlockCost]
) -> tuple[int, ...]:
    """Returns per block of a run the bytes of gradients that are there all through its backward and
    that it neither was given nor makes. `last`: of `last_readers`; `begin`: position of the first
    block of the run."""
    found = [0] * len(blocks)
    if not last:
        return tuple(found)
    made: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    for index, (block, cost) in enumerate(zip(blocks, costs, strict=True)):
        # What a block makes may be read by other stages alone.
        nbytes |= zip(block.outputs, cost.output_bytes, strict=True)
        nbytes |= zip(block.inputs, cost.input_bytes, strict=True)
        made |= dict.fromkeys(block.outputs, index)
    for name in nbytes.keys() & last.keys():
        for index in range(made.get(name, -1) + 1, min(last[name] - begin, len(blocks))):
            found[index] += nbytes[name]
    return tuple(found)
