"""Tokens on their way to the ranks of their experts and home: gathered, and summed, in one pass."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Block, Graph, Op
from meshwright.ir.layout.layout import Shard, Strategy, parse_strategy
from meshwright.ir.placed.found import FoundSpot
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage


def find(plan: Plan, graph: Graph) -> Iterator[FoundSpot]:
    for index, stage in enumerate(plan.stages):
        alike: dict[str, list[FoundSpot]] = {}
        for block in plan.stage_blocks(graph, index):
            name = stage.layouts.get(block.pattern)
            if name is not None and block.pattern not in alike:
                laid = plan.layout(name)
                alike[block.pattern] = [
                    found
                    for op in graph.block_ops(block)
                    if op.target == EXPERTS_TARGET
                    for found in _found(stage, laid, block, op, index)
                ]
            yield from alike.get(block.pattern, ())


def _found(
    stage: Stage, layout: BlockLayout, block: Block, op: Op, index: int
) -> Iterator[FoundSpot]:
    here = FoundSpot(f"{block.pattern}.{op.key}", "", index, block.name, op.key)
    sizes = {"dp": stage.dp} | dict(stage.model)
    found = {
        axis: parse_strategy(text)
        for axis, text in layout.ops.get(op.key, {}).items()
        if sizes.get(axis, 1) > 1
    }
    if any(travels(strategy) for strategy in found.values()):
        yield here
    elif any(isinstance(strategy.inputs[3], Shard) for strategy in found.values()):
        yield replace(here, why="every rank has all tokens: none travels")


def travels(strategy: Strategy) -> bool:
    """Whether an axis splits both tokens and experts."""
    return isinstance(strategy.inputs[0], Shard) and isinstance(strategy.inputs[3], Shard)
