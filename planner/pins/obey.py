"""A choice made to keep what is pinned for single stages and blocks, where that is a small change.

Searchers enumerate what is free everywhere. What is asked of one stage (its mesh, devices, shares)
or of some blocks (`Decision.obey`) is put into their choices here; what cannot be stays, and the
plan is refused.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.ir.memo import Memo
from meshwright.planner.pins.constraints import (
    Constraint,
    OnType,
    Pin,
    StageDevices,
    StageShares,
    is_scoped,
    mesh_allowed,
    of_stage,
    pinned,
)
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.problem.candidates import Choice, StageChoice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import Mesh, meshes

_Key = tuple[tuple[Constraint, ...], int, StageChoice, int]
"""Constraints, the stage's number and choice, samples of a micro-batch."""
_STAGES: Memo[_Key, StageChoice] = Memo()


def obey(problem: Problem, choice: Choice) -> Choice:
    """The choice with what constraints say of its stages."""
    if not is_scoped(problem.constraints):
        return choice
    samples = problem.batch // choice.num_microbatches
    stages = [_stage(problem, i, stage, samples) for i, stage in enumerate(choice.stages)]
    moved = _moves(problem, stages)
    return replace(
        choice,
        stages=tuple(replace(s, devices=tuple(moved[d] for d in s.devices)) for s in stages),
    )


def _stage(problem: Problem, index: int, stage: StageChoice, samples: int) -> StageChoice:
    """The stage with what constraints say of it: choices by the thousand have few stages."""
    known, key = _STAGES.of(problem), (problem.constraints, index, stage, samples)
    if key not in known:
        known[key] = _asked(problem, index, stage, samples)
    return known[key]


def _asked(problem: Problem, index: int, stage: StageChoice, samples: int) -> StageChoice:
    names = _names(problem, stage)
    asked = of_stage(problem.constraints, index, names)
    stage = _on_mesh(replace(problem, constraints=asked), stage, samples)
    for name, decision in DECISIONS.items():
        if decision.obey is not None:
            pins = [item for item in asked if isinstance(item, Pin) and item.name == name]
            stage = decision.obey(problem, stage, pins)
    for item in problem.constraints:
        if isinstance(item, StageShares) and item.stage == index:
            if (len(item.shares), sum(item.shares)) == (stage.dp, samples):
                stage = replace(stage, shares=item.shares)
    return stage


def _names(problem: Problem, stage: StageChoice) -> tuple[str, ...]:
    return tuple(block.name for block in problem.graph.blocks[stage.start : stage.stop])


def _on_mesh(problem: Problem, stage: StageChoice, samples: int) -> StageChoice:
    """The mesh that the pins leave and that differs least."""
    now = Mesh(stage.dp_replicate, stage.dp_shard, stage.model, stage.zero, stage.variant)
    legal = mesh_allowed(problem.constraints, now.dp_replicate, now.dp_shard, now.model)
    zero = pinned(problem.constraints, "zero")
    if legal and zero in (None, stage.zero):
        return stage
    found = list(meshes(problem, len(stage.devices), samples))
    if not found:
        return stage
    best = min(found, key=lambda mesh: (_distance(mesh, now), str(mesh)))
    return replace(
        stage, dp_replicate=best.dp_replicate, dp_shard=best.dp_shard, model=best.model,
        zero=best.zero, variant=best.variant, shares=stage.shares if best.dp == now.dp else (),
    )  # fmt: skip


def _distance(mesh: Mesh, other: Mesh) -> tuple[int, ...]:
    return (
        mesh.model != other.model,
        abs(mesh.dp_shard - other.dp_shard),
        abs(mesh.zero - other.zero),
        mesh.variant != other.variant,
    )


def _moves(problem: Problem, stages: Sequence[StageChoice]) -> dict[int, int]:
    """Device in the choice -> device that takes its place; all others fill up in order."""
    used = sorted({device for stage in stages for device in stage.devices})
    moved: dict[int, int] = {}
    for item in problem.constraints:
        if isinstance(item, StageDevices) and item.stage < len(stages):
            old = stages[item.stage].devices
            if len(old) == len(item.devices) and moved.keys().isdisjoint(old):
                moved |= dict(zip(old, item.devices, strict=True))
    for item in problem.constraints:
        if isinstance(item, OnType):
            for index, stage in enumerate(stages):
                if item.pin.scope.covers(index, _names(problem, stage)):
                    _move_to(moved, stage.devices, item.ranks, used)
    if len(set(moved.values())) < len(moved) or not set(moved.values()) <= set(used):
        return {device: device for device in used}
    taken = set(moved.values())
    free = iter([device for device in used if device not in taken])
    return {device: moved[device] if device in moved else next(free) for device in used}


def _move_to(
    moved: dict[int, int], devices: Sequence[int], ranks: Sequence[int], used: Sequence[int]
) -> None:
    """Puts devices that have no place yet on `ranks`, as long as there are some."""
    taken = set(moved.values())
    free = [rank for rank in ranks if rank in used and rank not in taken]
    for device in devices:
        if device not in moved and free:
            moved[device] = free.pop(0)
