"""Replicas in all."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(read=lambda plan, stage: stage.dp)
