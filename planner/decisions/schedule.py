"""The order in which stages work."""

from collections.abc import Iterator

from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.decision import Decision
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import MADE, SCHEDULES


def _notes(problem: Problem, plan: Plan) -> Iterator[str]:
    if paired_stages(plan):
        yield (
            f"{plan.schedule.name}: forwards and backwards run together in pairs, and collectives "
            "of each have the other beside them; the bound is of plans without that"
        )


DECISION = Decision(
    words=(*SCHEDULES, MADE),
    scope="plan",
    read=lambda plan, stage: plan.schedule.name,
    place=3,
    notes=_notes,
    words_of=lambda plan: [plan.schedule.name] * (len(plan.schedule.rows) > 1),
)
