"""Kernels whose places follow from how a plan lays a model out: one file per kernel.

A file has `find(plan, graph)`: every place that is right for the kernel, or looks right and is not.
Patterns of `ir.fusions` are looked for while a model is traced, these once there is a plan; both
have their names in `kernels`. Emitted code and the runtime use them where the plan has places.
"""

import importlib
from collections import Counter
from dataclasses import replace

from meshwright.ir.fusions import PLACED
from meshwright.ir.graph import Fusion, Graph, Missed
from meshwright.ir.placed.found import Found
from meshwright.ir.plan import Plan

JOINT = frozenset({"gather_linear", "linear_scatter", "reduce_norm"})
"""Those that take over an op with the collective beside it: emitted code has one call for both."""


def placed(plan: Plan, graph: Graph) -> tuple[Fusion, ...]:
    """The plan's kernels with the places of those that follow from its layout."""
    return tuple(
        _placed(fusion, plan, graph) if fusion.kernel in PLACED else fusion
        for fusion in plan.kernels
    )


def _placed(fusion: Fusion, plan: Plan, graph: Graph) -> Fusion:
    module = importlib.import_module(f"meshwright.ir.placed.{fusion.kernel}")
    found: Counter[Found] = Counter(module.find(plan, graph))
    missed = tuple(
        Missed(f.where, f.why, count)
        for f, count in sorted(found.items(), key=lambda item: (item[0].where, item[0].why))
        if f.why
    )
    places = sum(count for f, count in found.items() if not f.why)
    return replace(fusion, places=places, missed=missed)


def used(plan: Plan) -> frozenset[str]:
    """Kernels that have places in the plan."""
    return frozenset(fusion.kernel for fusion in plan.kernels if fusion.places)
