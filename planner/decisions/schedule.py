"""The order in which stages work."""

from meshwright.planner.pins.decision import Decision
from meshwright.planner.problem.schedule_tools import MADE, SCHEDULES

DECISION = Decision(
    words=(*SCHEDULES, MADE),
    scope="plan",
    read=lambda plan, stage: plan.schedule.name,
    place=3,
    words_of=lambda plan: [plan.schedule.name] * (len(plan.schedule.rows) > 1),
)
