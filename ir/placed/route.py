"""Tokens on their way to the ranks of their experts and home: gathered, and summed, in one pass."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.graph.experts import EXPERTS_OP
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.layout.layout import Shard, Strategy, parse_strategy
from meshwright.ir.placed.found import FoundSpot
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage


def find(plan: Plan, graph: Graph) -> Iterator[FoundSpot]:
    for index, stage in enumerate(plan.stages):
        first: dict[str, str] = {}
        for block in plan.stage_blocks(graph, index):
            for op in graph.block_ops(block):
                name = stage.layouts.get(block.pattern)
                if op.target == EXPERTS_OP and name is not None:
                    alike = first.setdefault(block.pattern, block.name)
                    where = f"{block.pattern}.{op.key}"
                    found = FoundSpot(where, stage=index, block=alike, op=op.key)
                    yield from _found(stage, plan.layout(name), op, found)


def _found(stage: Stage, layout: BlockLayout, op: Op, here: FoundSpot) -> Iterator[FoundSpot]:
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
