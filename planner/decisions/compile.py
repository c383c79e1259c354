"""Whether torch.compile makes kernels of what blocks do between collectives."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Stage
from meshwright.ir.plan.schedule import Schedule, halves_backwards
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Pin, Value

_YES, _NO = "true", "false"


def _together(pin: Pin, pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
    """What ops of compiled blocks keep is torch.compile's to say."""
    if pin.value != _YES:
        return ()
    kept = Pin("saved", "none")
    for other in pins:
        if other.name == kept.name and other != kept:
            raise PlanError(
                f"constraints {pin} and {other}: what single ops of compiled blocks keep is "
                "torch.compile's to say; nearest is recompute=full"
            )
    return (kept,)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where backwards are whole."""
    return replace(stage, compile=value == _YES and not halves_backwards(table()))


DECISION = Decision(
    words=(_NO, _YES),
    scope="plan",
    read=lambda plan, stage: _YES if stage.compile else _NO,
    together=_together,
    apply=_apply,
    show=lambda stage: "yes" if stage.compile else "-",
)
