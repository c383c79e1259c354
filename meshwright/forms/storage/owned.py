"""Each rank of dp_shard has its rows of a table, and nobody has it whole: a form of synchronisation
brings blocks the rows that they read."""

from collections.abc import Sequence

from meshwright.forms.exchange_rows import Event, Hold, Row
from meshwright.forms.running import Lines, ParameterStore, Slot
from meshwright.ir.plan.plan import Stage

SPLIT = True


def describe(replicas: int) -> tuple[Row, ...]:
    """Returns what is held; what is sent is the form's."""
    return (Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns the store; the form, which steps rows where they are, makes a rank's part."""
    return ParameterStore(())
