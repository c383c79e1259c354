"""Stage-aware recompute (`planner.problem.stage_aware`), where stages recompute all of their
layers."""

from collections.abc import Iterator

from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.constraints import STAGE_AWARE, allowed, is_scoped, pinned
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.stage_aware import layers, stage_aware
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """With as little recomputed as fits; the last is the best."""
    if len(plan.schedule.rows) < 2 or len(plan.schedule.rows) < len(plan.stages):
        return
    if not any("full" in stage.recompute.values() for stage in plan.stages) or is_pinned(problem):
        return
    count = len(layers(plan, problem.graph, 0))
    least, most = 0, count  # recomputed in stage 0: too few, or just enough
    while most - least > 1:
        middle = (least + most) // 2
        stages = stage_aware(plan, problem.graph, middle / count)
        made = changed(problem, plan, stages=stages)
        if excess_bytes(problem, made):
            least = middle
        else:
            most = middle
            yield made


def is_pinned(problem: Problem) -> bool:
    names = allowed(problem.constraints, "recompute", ("none", "full"))
    asked = pinned(problem.constraints, "recompute") == STAGE_AWARE
    saved = pinned(problem.constraints, "saved")
    free = asked or len(names) == 2
    return not free or saved not in (None, "none") or is_scoped(problem.constraints)
