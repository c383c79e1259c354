"""What forms do whose tables have owners, as tables: nobody has all of one, who reads rows asks for
them."""

from collections.abc import Iterator

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Send
from meshwright.forms.settings import Known, wrong_settings
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage

ZERO = 1
"""What of a table is split: owners step their part."""
ID_BYTES = 8
_OPS, _OPS_OF_RANK = 40, 7
"""Ops of torch's that a step of a table takes beside what moves bytes: to find distinct ids, ask
for them, take rows out, put parts together; and for each rank. Counted with a dispatch mode on 4
ranks, with 2 tables and with 4; on a CPU they took 13 us each, what it measures of any op."""
_MARK_BYTES = 1
"""Of an answer whether a row goes first."""
_TAKEN = 2
"""Times that the bytes of rows move when they are taken out of a table."""


def exchange_of_owners(
    owners: int,
    each: float,
    row_bytes: int,
    *,
    to_all: bool,
    stepped: float,
    busiest: float = 1.0,
) -> Exchange:
    """Returns what a form does that sends rows both ways, and their numbers when they are asked
    for.

    `each`: share of rows that a rank reads, of `row_bytes` bytes; `to_all`: all ranks are told all
    numbers, else each those of its own; `stepped`: share of rows that any rank reads; `busiest`:
    times the mean that one owner has of the rows.
    """
    way = {"axis": "dp_shard", "unit": "bucket", "by_rank": True, "joint": True}
    rows = {"primitive": Primitive.ALL_TO_ALL, "loaded": "busiest", **way}
    numbers = {"primitive": Primitive.ALL_GATHER, **way} if to_all else rows
    now = {"at": Event.UPDATED, "until": Event.UPDATED}
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            # Blocks have the rows of a batch, and gradients of those.
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1, share="rows"),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1,
                 share="rows"),
            # Owners sum gradients into zeros: of all rows, or of those that come with their values.
            Hold(kind="gradients", since=Event.END, until=Event.NEXT_BEGIN, part=1, steps="all"),
            Rewrite(what="gradients", unit="bucket", at=Event.END, moved=1 / owners,
                    steps="all"),
            # From the ids of a batch to the rows of the next.
            Rewrite(what="gradients", unit="bucket", at=Event.END, moved=0.0,
                    calls=ops_of_rows(owners)),
            # Values and sums of those that come, on who has most of them.
            Hold(kind="gradients", since=Event.END, until=Event.NEXT_BEGIN, part=2,
                 share="most", steps="some"),
            Rewrite(what="gradients", unit="bucket", at=Event.END, steps="some",
                    moved=(_TAKEN + 1) * stepped / owners),
            Send(what="gradients", at=Event.END, until=Event.END, share="rows", **rows),  # type: ignore[arg-type]
            # Copies of owners sum rows that any of them has a gradient of.
            Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate",
                 unit="bucket", at=Event.END, until=Event.END, of_part=True, share="stepped"),
            Send(what="parameters", share="numbers", **numbers, **now),  # type: ignore[arg-type]
            _TOLD,
            Send(what="parameters", share="rows", **rows, **now),  # type: ignore[arg-type]
        ),
        stated={"rows": each, "numbers": each * ID_BYTES / row_bytes, "busiest": busiest,
                "stepped": stepped, "most": min(1.0, stepped * busiest),
                "told": _told(owners, each, row_bytes, stepped, to_all)},
        stepped="stepped",
    )  # fmt: skip


def exchange_of_late_owners(
    owners: int,
    each: float,
    row_bytes: int,
    *,
    to_all: bool,
    stepped: float,
    prior: float,
    busiest: float = 1.0,
) -> Exchange:
    """Returns what a form does that sends gradients of the rows that any rank's next batch reads
    first, and the others under the next step.

    `prior`: share of a batch's rows that are read so; all else as of `exchange_of_owners`.
    """
    way = {"axis": "dp_shard", "unit": "bucket", "by_rank": True}
    rows = {"primitive": Primitive.ALL_TO_ALL, "loaded": "busiest", **way}
    numbers = {"primitive": Primitive.ALL_GATHER, **way} if to_all else rows
    end = {"what": "gradients", "at": Event.END, "until": Event.END}
    now = {"what": "parameters", "at": Event.UPDATED, "until": Event.UPDATED, "joint": True}
    copies = {"primitive": Primitive.ALL_REDUCE, "axis": "dp_replicate", "unit": "bucket",
              "of_part": True, **end}  # fmt: skip
    # Who is told of all rows that ranks ask for knows which go first; others are told, by a byte.
    answer = 0.0 if to_all else _MARK_BYTES / row_bytes
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            # Blocks have the rows of a batch, and gradients of those.
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1, share="here"),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1,
                 share="here"),
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            # Owners sum gradients into zeros.
            Rewrite(what="gradients", unit="bucket", at=Event.END, moved=1 / owners),
            Rewrite(what="gradients", unit="bucket", at=Event.END, moved=0.0,
                    calls=ops_of_rows(owners)),
            Send(share="first", joint=True, **rows, **end),  # type: ignore[arg-type]
            Send(share="late", lag=1, **rows, **end),  # type: ignore[arg-type]
            # Copies of owners agree on sums of the rows that go first, and later on those of all.
            Send(share="stepped", **copies),  # type: ignore[arg-type]
            Send(**copies),  # type: ignore[arg-type]
            Send(share="numbers", **numbers, **now),  # type: ignore[arg-type]
            _TOLD,
            Send(share="here", **rows, **now),  # type: ignore[arg-type]
        ),
        stated={"here": each, "busiest": busiest, "first": each * (prior + answer),
                "late": each * (1 - prior), "numbers": each * ID_BYTES / row_bytes,
                "stepped": stepped, "told": _told(owners, each, row_bytes, stepped, to_all)},
    )  # fmt: skip


_TOLD = Send(
    what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_replicate", unit="bucket",
    at=Event.UPDATED, until=Event.UPDATED, of_part=True, share="told", by_rank=True,
)  # fmt: skip
"""Copies of owners tell each other which rows they are asked for."""


def _told(owners: int, each: float, row_bytes: int, stepped: float, to_all: bool) -> float:
    """Bytes of the numbers that one copy of an owner tells the others, per byte of its part: of
    rows that the owners' own ranks ask for, taken to be others each."""
    # A part has all rows, of a part of their columns, or some rows whole.
    return min(stepped, each * owners) * ID_BYTES / row_bytes * (owners if to_all else 1)


def ops_of_rows(owners: int) -> float:
    """Returns the ops of a step of one table, those that move bytes left out."""
    return _OPS + _OPS_OF_RANK * owners


def wrong_owners(form: str, known: Known, stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a form whose rows have owners in a stage, and what would be right;
    `known`: its settings."""
    yield from wrong_settings(form, known, stage.sync.settings if stage.sync else {})
    if stage.zero != ZERO:
        yield f"{form} gives each rank rows to step, and zero is {stage.zero}", f"zero {ZERO}"
    elif stage.dp > 1 and not stage.is_sharded:
        yield f"{form} shares rows out over dp_shard, which is 1", f"dp_shard {stage.dp}"
