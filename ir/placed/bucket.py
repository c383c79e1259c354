"""Gradients and parameters that move in buckets: packed and unpacked in one pass."""

from collections.abc import Iterator

from meshwright.ir.graph.graph import Graph
from meshwright.ir.placed.found import FoundSpot
from meshwright.ir.plan.plan import Plan


def find(plan: Plan, graph: Graph) -> Iterator[FoundSpot]:
    """One place for each stage that shards."""
    for index, stage in enumerate(plan.stages):
        if stage.dp == 1:
            continue
        why = "its gradients lie side by side in one buffer already, so nothing is packed"
        yield FoundSpot(f"stage {index}", "" if stage.is_sharded else why, index)
