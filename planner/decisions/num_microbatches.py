"""Micro-batches of a step."""

from meshwright.planner.pins.decision import Decision

DECISION = Decision(
    scope="plan",
    read=lambda plan, stage: plan.num_microbatches,
    place=2,
    words_of=lambda plan: [f"x{plan.num_microbatches}"] * (plan.num_microbatches > 1),
)
