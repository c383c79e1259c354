"""Merak's stage-aware recompute (arXiv:2206.04959): later stages hold less, so they recompute less.

If stage 0 recomputes the share r of its layers, a later stage s of S recomputes
1 - (1-r)(S-1)/(S-s) of its own, none if that is negative, and the last stage none; the first layers
of a stage keep theirs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from meshwright.ir.plan import Plan, Stage
from meshwright.planner.candidates import recomputable
from meshwright.planner.finish import changed
from meshwright.planner.pins.constraints import allowed, is_scoped, pinned
from meshwright.planner.predict import excess_bytes
from meshwright.planner.problem import Problem


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """With as little recomputed as fits; the last is the best."""
    if len(plan.schedule.rows) < 2 or len(plan.schedule.rows) < len(plan.stages):
        return
    if not any("full" in stage.recompute.values() for stage in plan.stages) or is_pinned(problem):
        return
    layers = _layers(problem, plan, 0)
    least, most = 0, len(layers)  # recomputed in stage 0: too few, or just enough
    while most - least > 1:
        middle = (least + most) // 2
        made = stage_aware(problem, plan, middle / len(layers))
        if excess_bytes(problem, made):
            least = middle
        else:
            most = middle
            yield made


def is_pinned(problem: Problem) -> bool:
    names = allowed(problem.constraints, "recompute", ("none", "full"))
    saved = pinned(problem.constraints, "saved")
    return len(names) < 2 or saved not in (None, "none") or is_scoped(problem.constraints)


def stage_aware(problem: Problem, plan: Plan, first: float) -> Plan:
    """The plan with stage 0 recomputing the share `first` of its layers, and others less."""
    shares = ratios(len(plan.stages), first)
    stages = (
        _recomputing(stage, _layers(problem, plan, i), shares[i])
        for i, stage in enumerate(plan.stages)
    )
    return changed(problem, plan, stages=tuple(stages))


def ratios(num_stages: int, first: float) -> tuple[float, ...]:
    """Share of the layers that each stage recomputes."""
    last = num_stages - 1
    later = (1 - (1 - first) * last / (num_stages - s) for s in range(1, last))
    return (first, *(max(0.0, share) for share in later), 0.0) if last else (0.0,)


def _recomputing(stage: Stage, layers: Sequence[str], share: float) -> Stage:
    kept = int((1 - share) * len(layers) + 1e-9)
    again: dict[str, Literal["none", "full"]] = dict.fromkeys(layers[kept:], "full")
    return replace(stage, recompute=again, saved={})


def _layers(problem: Problem, plan: Plan, index: int) -> tuple[str, ...]:
    """Names of the blocks of a stage that recompute is for."""
    blocks = plan.stage_blocks(problem.graph, index)
    patterns = recomputable(problem.graph, blocks)
    return tuple(block.name for block in blocks if block.pattern in patterns)
