"""Micro-batches of a step."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(scope="plan", read=lambda plan, stage: plan.num_microbatches)
