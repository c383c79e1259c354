"""Merak's schedules (`planner.schedules`), for pipelines that recompute under 1F1B."""

from collections.abc import Iterator

from meshwright.forms.retention import retention, said_by
from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import (
    SCHEDULES,
    fits,
    make_schedule,
    plan_table,
    recomputes_early,
    stages_per_rank,
)
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan under each schedule that says when stages recompute."""
    ranks = len(plan.schedule.rows)
    if ranks == 1 or ranks < len(plan.stages) or not recomputes(plan):
        return
    count = plan.num_microbatches
    names = [
        name
        for name in SCHEDULES
        if recomputes_early(name) and name != plan.schedule.name and 1 in stages_per_rank(name)
    ]
    for name in allowed(problem.constraints, "schedule", names):
        if fits(name, ranks, count, ranks):
            made = make_schedule(name, ranks, count, ranks)
            yield changed(problem, plan, schedule=plan_table(name, made))


def recomputes(plan: Plan) -> bool:
    """Whether stages make something again, and hold nothing otherwise than it is."""
    forms = [retention(name) for name in said_by(plan)]
    return any(f.again for f in forms) and not any(f.build or f.decide for f in forms)
