"""Every replica has parameters whole, where blocks read them."""

from collections.abc import Sequence

from meshwright.forms.exchange_rows import Event, Hold, Row
from meshwright.forms.flat import held_whole
from meshwright.forms.running import Lines, ParameterStore, Slot
from meshwright.ir.plan.plan import Stage


def describe(replicas: int) -> tuple[Row, ...]:
    """Returns what is held; nothing is sent."""
    return (Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns the parameters as they are."""
    return ParameterStore(held_whole(slots, lines))
