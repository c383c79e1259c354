"""Ranks of one replica."""

from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.decision import Decision, Machinery


def _axes(plan: Plan) -> int:
    return len({axis for stage in plan.stages for axis, size in stage.model if size > 1})


DECISION = Decision(read=lambda plan, stage: stage.model_size, machinery=Machinery(4, _axes))
