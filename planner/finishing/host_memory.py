"""Stores that take less of a device's memory, in the place of what plans do for want of it: making
again, moving activations."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.forms.retention import AGAIN, said_by
from meshwright.forms.storage import relieving
from meshwright.forms.sync_findings import of_stage
from meshwright.ir.plan.plan import FormChoice, Plan, Stage
from meshwright.planner.pins.constraints import allowed, pins_of
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with each store that relieves a device, where it makes or moves something for want
    of memory, and then with as much of that left out as fits."""
    apart = any(device.is_apart for device in problem.tables.devices.values())
    if not apart:
        return
    # What a pin asks for is not done for want of memory.
    free = not any(pins_of(problem.constraints, name) for name in ("recompute", "saved"))
    in_need = excess_bytes(problem, plan) or (free and said_by(plan) and _fits_not(problem, plan))
    if not in_need or any(stage.store for stage in plan.stages):
        return
    for store in allowed(problem.constraints, "store", relieving()):
        stages = tuple([_in_store(stage, store, plan.optimizer) for stage in plan.stages])
        if stages == plan.stages:
            continue
        found = changed(problem, plan, stages=stages)
        yield found
        if excess_bytes(problem, found):
            continue
        if free:
            yield from _lighter(problem, found)


def _fits_not(problem: Problem, plan: Plan) -> bool:
    """Whether the plan has no room for what it makes again or moves."""
    kept = changed(problem, plan, stages=_sharing(problem, plan, 0.0))
    return bool(excess_bytes(problem, kept))


def _lighter(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """As few blocks of each stage as fit are made again or moved, by halves; those that come first
    are."""
    low, high = 0.0, 1.0  # share of blocks: too few, or enough
    none = changed(problem, plan, stages=_sharing(problem, plan, 0.0))
    if not excess_bytes(problem, none):
        yield none
        return
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tried = changed(problem, plan, stages=_sharing(problem, plan, middle))
        if excess_bytes(problem, tried):
            low = middle
        else:
            high = middle
            yield tried


HALVINGS = 4


def _sharing(problem: Problem, plan: Plan, share: float) -> tuple[Stage, ...]:
    found = []
    for index, stage in enumerate(plan.stages):
        blocks = plan.stage_blocks(problem.graph, index)
        again = [b for b in blocks if stage.recomputes(b)]
        kept = [b for b in blocks if stage.keeping(b)]
        first = {b.name for own in (again, kept) for b in own[: round(share * len(own))]}
        found.append(
            replace(
                stage,
                recompute={b.name: AGAIN for b in again if b.name in first},
                saved={b.name: stage.keeping(b) for b in kept if b.name in first},
            )
        )
    return tuple(found)


def _in_store(stage: Stage, store: str, optimizer: str) -> Stage:
    """The stage with a store, where that goes with what else it does."""
    tried = replace(stage, store=FormChoice(form=store))
    ok = not stage.by_parameter and not any(of_stage(tried, optimizer))
    return tried if ok else stage
