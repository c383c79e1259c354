"""Parameters updated from gradients as they lie in their bucket, in one pass that scales them."""

from collections.abc import Iterator

from meshwright.ir.graph import Graph
from meshwright.ir.placed.found import Found
from meshwright.ir.plan import Plan

UPDATES = ("adam", "adamw", "sgd", "sgd_momentum")
"""Optimizers that the kernel steps."""


def find(plan: Plan, graph: Graph) -> Iterator[Found]:
    """One place for each stage."""
    known = plan.optimizer in UPDATES
    why = "" if known else f"no kernel steps {plan.optimizer}; there are {', '.join(UPDATES)}"
    for index in range(len(plan.stages)):
        yield Found(f"stage {index}", why, index)
