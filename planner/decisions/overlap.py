"""What goes on beside collectives of model axes."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.ir.plan.plan import OVERLAPS, Stage
from meshwright.ir.plan.schedule import Schedule, halves_backwards
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Pin, Value


def _admits(pin: Pin, stage: Stage) -> bool:
    return stage.model_size == 1 or pin.admits(stage.overlap)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where it has an effect."""
    if stage.model_size == 1 or halves_backwards(table()):
        return stage
    return replace(stage, overlap=next(level for level in OVERLAPS if level == value))


DECISION = Decision(
    words=OVERLAPS,
    scope="plan",
    read=lambda plan, stage: stage.overlap,
    admits=_admits,
    apply=_apply,
    show=lambda stage: "-" if stage.overlap == "none" else stage.overlap,
)
