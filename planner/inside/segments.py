"""The parts of a graph that get a layout each: the prelude and the first block of each pattern."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.ir.graph.graph import Block, Graph, Op
from meshwright.ir.graph.prelude import prelude_block
from meshwright.ir.graph.rules import Rule
from meshwright.planner.strategies import find_rule


@dataclass(frozen=True, slots=True)
class LayoutSegment:
    """A run of ops that is laid out as one."""

    block: Block
    ops: tuple[Op, ...]
    rules: dict[str, Rule | None]
    """Per op name."""


def segments(graph: Graph) -> tuple[LayoutSegment, ...]:
    """The prelude, then one segment per pattern, in order."""
    blocks = [prelude_block(graph), *graph.distinct_blocks()]
    return tuple(
        LayoutSegment(
            b, graph.block_ops(b), {op.name: find_rule(op, graph) for op in graph.block_ops(b)}
        )
        for b in blocks
    )


def aliases(graph: Graph) -> Callable[[str], str]:
    """One name for all values at the same place of equal blocks: they are laid out alike."""
    first = {block.pattern: block for block in graph.distinct_blocks()}
    same: dict[str, str] = {}
    for block in graph.blocks:
        for own, model in zip(block.outputs, first[block.pattern].outputs, strict=True):
            same[own] = model
    root: dict[str, str] = {}

    def find(name: str) -> str:
        name = same.get(name, name)
        while name in root:
            name = root[name]
        return name

    for block in graph.blocks:
        for own, model in zip(block.inputs, first[block.pattern].inputs, strict=True):
            a, b = find(model), find(own)
            if a != b:
                root[b] = a
    return find


def tied(graph: Graph) -> Callable[[str], str]:
    """One name for all parameters, buffers and constants that must be stored alike: those at the
    same place of equal blocks, and whatever is the same as one of them elsewhere."""
    first = {block.pattern: block for block in graph.distinct_blocks()}
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while name in root:
            name = root[name]
        return name

    for block in graph.blocks:
        for own, model in zip(block.params, first[block.pattern].params, strict=True):
            a, b = find(model), find(own)
            if a != b:
                root[b] = a
    return find
