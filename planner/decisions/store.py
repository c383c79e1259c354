"""Where parameters are: as `zero` says, or in a store of its own."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwright.forms.storage import for_stages, relieving
from meshwright.forms.sync import goes_with, takes
from meshwright.ir.plan.plan import FormChoice, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.pins.constraints import allowed, pinned
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Constraint, Pin, Value

_AS_ZERO = "zero"


def _store(stage: Stage) -> str:
    return stage.store.form if stage.store else _AS_ZERO


def pinned_store(constraints: Iterable[Constraint]) -> str:
    """Returns the store that all stages are asked to have; empty if none is."""
    value = pinned(constraints, "store")
    return str(value) if value in for_stages() else ""


def relieving_pins(constraints: Iterable[Constraint]) -> tuple[Pin, ...]:
    """Returns the pins of the stores that take less of a device's memory, as far as pins leave
    them; none where one store is asked for."""
    asked = tuple(constraints)
    if pinned(asked, "store") is not None:
        return ()
    return tuple(Pin("store", store) for store in allowed(asked, "store", relieving()))


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where it goes with their zero."""
    name = str(value)
    if name not in for_stages() or not takes(stage, name):
        return stage
    if stage.sync is None and not goes_with(stage.sync_form, stage.dp, stage.zero, name):
        return stage
    return replace(stage, store=FormChoice(form=name))


DECISION = Decision(
    words=(_AS_ZERO, *for_stages()),
    scope="plan",
    read=lambda plan, stage: _store(stage),
    apply=_apply,
    place=7,
    words_of=lambda plan: sorted({f"store {s.store.form}" for s in plan.stages if s.store}),
    show=lambda stage: str(stage.store or "-"),
)
