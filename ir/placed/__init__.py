"""Kernels whose places follow from how a plan lays a model out: one file per kernel.

A file has `find(plan, graph)`: every place that is right for the kernel, or looks right and is not;
one of a kernel that takes over an op with the collective beside it has `look(laid)` instead, the
same of one block. Patterns of `ir.kernels` are looked for while a model is traced, these once there
is a plan; both have their names in `kernels`. Emitted code and the runtime use them where the plan
has places.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from meshwright.ir.extensions import Files
from meshwright.ir.graph.graph import Block, Fusion, Graph, Missed
from meshwright.ir.kernels import PLACED, is_placed, joint_of_users
from meshwright.ir.placed.found import FoundSpot, Worth
from meshwright.ir.placed.spots import KernelSpot, Known, Look, everywhere, spots
from meshwright.ir.plan.plan import Plan

_FILES = Files(sys.modules[__name__], "placed kernel")


@cache
def looks() -> Mapping[str, Look]:
    """Where to look for places of kernels that take over an op with the collective beside it:
    emitted code has one call for both."""
    files = {**{name: _FILES.load(name) for name in PLACED}, **joint_of_users()}
    return {name: file.look for name, file in files.items() if hasattr(file, "look")}


def joint_kernels() -> frozenset[str]:
    """Names of those kernels."""
    return frozenset(looks())


def placed(
    plan: Plan, graph: Graph, worth: Worth | None = None, known: Known | None = None
) -> tuple[Fusion, ...]:
    """The plan's kernels with the places of those that follow from its layout; with `worth`, only
    the places that are. `known` is what was found in other plans for the graph."""
    known = {} if known is None else known
    return tuple(
        _placed(fusion, plan, graph, worth, known) if is_placed(fusion.kernel) else fusion
        for fusion in plan.kernels
    )


def _placed(fusion: Fusion, plan: Plan, graph: Graph, worth: Worth | None, known: Known) -> Fusion:
    found: Counter[FoundSpot] = Counter()
    if look := looks().get(fusion.kernel):
        for at, count in everywhere(plan, graph, look, known):
            found[at] += count
    else:
        found.update(_FILES.load(fusion.kernel).find(plan, graph))
    left: dict[str, str] = {}
    # What does not pay in one stage is left out in all: a place has no stage in its name.
    for at in found if worth else ():
        if worth and not at.why and (why := worth(fusion.kernel, at)):
            left.setdefault(at.where, why)
    missed: Counter[tuple[str, str, bool]] = Counter()
    places = 0
    for at, count in found.items():
        if why := at.why or left.get(at.where, ""):
            missed[at.where, why, not at.why] += count
        else:
            places += count
    rows = tuple(
        Missed(where, why, count, is_declined)
        for (where, why, is_declined), count in sorted(missed.items())
    )
    return replace(fusion, places=places, missed=rows)


def used(plan: Plan) -> frozenset[str]:
    """Kernels that have places in the plan."""
    return frozenset(fusion.kernel for fusion in plan.kernels if fusion.places)


def used_at(plan: Plan, stage: int) -> frozenset[str]:
    """Those that a stage has, as far as that depends on the stage."""
    return used(plan) - {kernel for kernel, where in declined(plan) if where == f"stage {stage}"}


def declined(plan: Plan) -> frozenset[tuple[str, str]]:
    """(kernel, place) that are left out for their price."""
    return frozenset((f.kernel, m.where) for f in plan.kernels for m in f.missed if m.declined)


def joint_spots(
    plan: Plan, graph: Graph, stage: int, block: Block
) -> dict[str, tuple[str, KernelSpot]]:
    """`Op.key` -> kernel and spot, of what the plan's kernels take over in a block."""
    found: dict[str, tuple[str, KernelSpot]] = {}
    without = declined(plan)
    for kernel in sorted(used(plan) & joint_kernels()):
        for spot in spots(plan, graph, stage, block, looks()[kernel]):
            if not spot.why and (kernel, f"{block.pattern}.{spot.op.key}") not in without:
                found[spot.op.key] = kernel, spot
    return found
