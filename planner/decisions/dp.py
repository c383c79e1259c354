"""Replicas in all."""

from meshwright.planner.pins.decision import Decision, Machinery

DECISION = Decision(
    read=lambda plan, stage: stage.dp,
    machinery=Machinery(2, lambda plan: len({tuple(stage.mesh.items()) for stage in plan.stages})),
)
