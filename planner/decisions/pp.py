"""Ranks of the pipeline."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(scope="plan", read=lambda plan, stage: len(plan.schedule.rows))
