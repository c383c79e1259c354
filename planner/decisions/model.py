"""Ranks of one replica."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(read=lambda plan, stage: stage.model_size)
