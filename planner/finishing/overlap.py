"""Collectives of model axes beside other work (`Stage.overlap`), where that is predicted to pay."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.plan import OVERLAPS, Overlap, Plan, ScheduleTable
from meshwright.ir.schedule import halves_backwards
from meshwright.planner.finish import changed
from meshwright.planner.finishing.early_recompute import recomputes
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem import Problem
from meshwright.planner.schedule_tools import make_schedule

PLAIN, EARLY = "one_f_one_b", "full_critical_path_1f1b"


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Each level that pins leave, in every stage with model axes; where the schedule has halves of
    backwards, under others."""
    if all(stage.model_size == 1 for stage in plan.stages):
        return
    bases = [plan]
    if halves_backwards(problem.tables.schedule(plan.schedule)):
        bases = list(_with_whole_backwards(problem, plan))
    left = set(allowed(problem.constraints, "overlap", OVERLAPS[1:]))
    for base in bases:
        for level in (level for level in OVERLAPS[1:] if level in left):
            found = overlapped(problem, base, level)
            if found is not base:
                yield found


def _with_whole_backwards(problem: Problem, plan: Plan) -> Iterator[Plan]:
    ranks = len(plan.schedule.rows)
    if ranks == len(plan.stages):
        names = [PLAIN, *([EARLY] if recomputes(plan) else [])]
        for name in allowed(problem.constraints, "schedule", names):
            made = make_schedule(name, ranks, plan.num_microbatches, ranks)
            table = ScheduleTable(name=name, rows=tuple(str(made).splitlines()))
            yield replace(plan, schedule=table)


def overlapped(problem: Problem, plan: Plan, level: Overlap) -> Plan:
    """The plan with a level; itself if it has it already."""
    stages = tuple(
        replace(stage, overlap=level) if stage.model_size > 1 else stage for stage in plan.stages
    )
    return plan if stages == plan.stages else changed(problem, plan, stages=stages)


def overlaps(plan: Plan) -> bool:
    """Whether something goes on beside collectives, or blocks are compiled: bounds take collectives
    and blocks as they come."""
    return any(stage.overlap != "none" or stage.compile for stage in plan.stages)
