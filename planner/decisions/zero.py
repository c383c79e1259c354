"""What is sharded over dp_shard: 1 optimizer state, 2 also gradients, 3 also parameters."""

from meshwright.ir.plan.plan import Stage
from meshwright.planner.pins.decision import Decision


def _show(stage: Stage) -> str:
    return f"{stage.zero}, {stage.prefetch} ahead" if stage.prefetch else str(stage.zero)


DECISION = Decision(least=0, most=3, read=lambda plan, stage: stage.zero, show=_show)
