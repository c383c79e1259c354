"""Ranks of the pipeline."""

from meshwright.planner.pins.decision import Decision, Machinery

DECISION = Decision(
    scope="plan",
    read=lambda plan, stage: len(plan.schedule.rows),
    place=0,
    machinery=Machinery(3, lambda plan: len(plan.stages), "stages"),
    of_stages=True,
)
