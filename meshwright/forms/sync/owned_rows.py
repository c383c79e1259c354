"""EmbRace: rows that occur go to their owners, and rows that the next batch reads come back (Li et
al. 2022).

Each rank of dp_shard owns some rows of a table: it sums their gradients, holds the state of their
optimizer and steps them. A rank asks owners for the rows that its next batch reads, and then sends
them the gradients of those, as they know already which they are. It has nothing of other rows: no
rank has a table whole. As owners step all that they own, every optimizer that steps each element
alone is exact.

The rows that a batch reads are those in one of the model's inputs, `ids`. Where the next batch is
not known, they are asked for when it has come.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from meshwright.forms.exchange import Event, Exchange, Hold, Rewrite, Send
from meshwright.forms.owned import ZERO, OwnedRows, owned_tables, wrong_owners
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SEARCHED = False
STORE, SPLIT = "owned", True
TABLES = ("rows_each", "row_bytes", "ids")
TABLE_ZERO = ZERO
_SETTINGS: Known = {
    "rows_each": Number(1.0, 1e-9, 1.0), "row_bytes": Number(256, 1, 2**40), "ids": Text(),
}  # fmt: skip
"""Share of rows that one rank's batch reads; bytes of a row; the input that names them."""
_ID_BYTES = 8


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is held and sent: rows both ways, and their numbers when they are asked for."""
    told = FormSettings(_SETTINGS, settings)
    each = told.number("rows_each")
    way = {"primitive": Primitive.ALL_TO_ALL, "axis": "dp_shard", "unit": "bucket",
           "by_rank": True}  # fmt: skip
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            # Blocks have the rows of a batch, and gradients of those.
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1, share="rows"),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1,
                 share="rows"),
            Hold(kind="gradients", since=Event.END, until=Event.NEXT_BEGIN, part=1),
            # Owners sum gradients into zeros.
            Rewrite(what="gradients", unit="bucket", at=Event.END, moved=1 / replicas),
            Send(what="gradients", at=Event.END, until=Event.END, share="rows", **way),  # type: ignore[arg-type]
            Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate",
                 unit="bucket", at=Event.END, until=Event.END, of_part=True),
            Send(what="parameters", at=Event.UPDATED, until=Event.UPDATED, share="rows asked for",
                 **way),  # type: ignore[arg-type]
        ),
        stated={"rows": each, "rows asked for": each * (1 + _ID_BYTES / told.whole("row_bytes"))},
    )  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_owners("owned_rows", _SETTINGS, stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage)], lines)


def build_together(groups: Sequence[tuple[Sequence[Slot], Stage]], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return OwnedRows(*owned_tables("owned_rows", groups, lines), lines)
