"""How replicas agree on gradients: as `zero` says, or by a form of its own."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.forms.sync import has_taps, pinnable, suits
from meshwright.ir.plan.plan import FormChoice, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.pins.decision import Decision, Machinery
from meshwright.planner.pins.decisions import Pin, Value

_AS_ZERO = "zero"


def _form(stage: Stage) -> str:
    return stage.sync.form if stage.sync else _AS_ZERO


def _admits(pin: Pin, stage: Stage) -> bool:
    if stage.dp == 1:  # as any of them, but for a method that one replica would not train by
        return pin.admits(_AS_ZERO) or any(
            pin.admits(form) and not has_taps(form) for form in pinnable()
        )
    return pin.admits(_form(stage))


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where there are replicas and it goes with their zero."""
    form = str(value)
    if form not in pinnable() or stage.dp == 1 or not suits(form, stage.zero):
        return stage
    return replace(stage, sync=FormChoice(form=form))


DECISION = Decision(
    words=(_AS_ZERO, *pinnable()),
    scope="plan",
    read=lambda plan, stage: _form(stage),
    admits=_admits,
    apply=_apply,
    place=6,
    words_of=lambda plan: sorted({f"sync {s.sync.form}" for s in plan.stages if s.sync}),
    machinery=Machinery(0, lambda plan: int(any(stage.sync is not None for stage in plan.stages))),
    show=lambda stage: str(stage.sync or "-"),
)
