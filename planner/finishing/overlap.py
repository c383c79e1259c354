"""Collectives of model axes beside other work (`Stage.overlap`), where that is predicted to pay."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.plan import OVERLAPS, Overlap, Plan
from meshwright.ir.schedule import halves_backwards
from meshwright.planner.finish import changed
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem import Problem


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Each level that pins leave, in every stage with model axes."""
    if halves_backwards(problem.tables.schedule(plan.schedule)):
        return
    if all(stage.model_size == 1 for stage in plan.stages):
        return
    left = set(allowed(problem.constraints, "overlap", OVERLAPS))
    for level in (level for level in OVERLAPS if level in left):
        found = overlapped(problem, plan, level)
        if found is not plan:
            yield found


def overlapped(problem: Problem, plan: Plan, level: Overlap) -> Plan:
    """The plan with a level; itself if it has it already."""
    stages = tuple(
        replace(stage, overlap=level) if stage.model_size > 1 else stage for stage in plan.stages
    )
    return plan if stages == plan.stages else changed(problem, plan, stages=stages)


def overlaps(plan: Plan) -> bool:
    """Whether something goes on beside collectives: bounds take these as they come."""
    return any(stage.overlap != "none" for stage in plan.stages)
