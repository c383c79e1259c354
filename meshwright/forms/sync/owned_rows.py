"""EmbRace: rows that occur go to their owners, and rows that the next batch reads come back (Li et
al. 2022).

Each rank of dp_shard owns some rows of a table: it sums their gradients, holds the state of their
optimizer and steps them. A rank asks owners for the rows that its next batch reads, and then sends
them the gradients of those, as they know already which they are. Of all other rows it has old
values, which nobody looks at.
Whoever reads a table otherwise waits for all of it. As owners step all that they own, every
optimizer that steps each element alone is exact.

The rows that a batch reads are those in one of the model's inputs, `ids`. Where the next batch is
not known, they are asked for when it has come.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.exchange import Event, Exchange, Hold, Send
from meshwright.forms.flat import chunk_rows, frozen, held_whole, sum_over_copies, trainable
from meshwright.forms.rows import torn_rows
from meshwright.forms.running import (
    Held,
    Lines,
    ParameterStore,
    Samples,
    Slot,
    SyncRun,
    Update,
)
from meshwright.forms.settings import FormSettings, Known, Number, Text, wrong_settings
from meshwright.ir.comm.collective import What
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage
from meshwright.ir.profile.measured import Purpose

EXACT = True
SEARCHED = False
TABLES = ("rows_each", "row_bytes", "ids")
TABLE_ZERO = 1
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
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="gradients", since=Event.END, until=Event.NEXT_BEGIN, part=1),
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
    said = stage.sync.settings if stage.sync else {}
    yield from wrong_settings("owned_rows", _SETTINGS, said)
    if stage.zero != TABLE_ZERO:
        yield f"owned_rows gives each rank rows to step, and zero is {stage.zero}", "zero 1"
    elif stage.dp > 1 and not stage.is_sharded:
        yield "owned_rows shares rows out over dp_shard, which is 1", f"dp_shard {stage.dp}"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage)], lines)


def build_together(groups: Sequence[tuple[Sequence[Slot], Stage]], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    tables, still = [], []
    for slots, stage in groups:
        told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
        for slot in slots:
            if slot.whole.ndim < 2 or slot.whole.shape[0] != slot.param.global_shape[0]:
                raise PlanError(str(torn_rows("owned_rows", slot.param.fqn)))
        tables += [_OwnedTable(slot, told.word("ids"), lines) for slot in trainable(slots)]
        still += frozen(slots)
    return _Owned(tables, still, lines)


class _OwnedTable:
    """A table, and the rows of it that this rank owns."""

    def __init__(self, slot: Slot, ids: str, lines: Lines) -> None:
        size = lines.shards.size
        self.slot, self.ids, self.chunk = slot, ids, -(-slot.rows // size)
        self.start, self.stop = chunk_rows(slot.rows, size, lines.shards.coordinate)
        self.shard = nn.Parameter(slot.whole.detach()[self.start : self.stop])
        primary = lines.is_primary(slot.param, "dp_replicate")
        rows = (self.start, self.stop)
        self.held = Held(slot.param, lines.stage, self.shard, rows, primary)

    def rows(self, batch: Samples) -> Tensor:
        """Those that a batch of this rank reads, ascending."""
        if self.ids not in batch:
            given = ", ".join(batch)
            raise PlanError(f"owned_rows reads rows from input {self.ids!r}; given are {given}")
        ids = batch[self.ids].detach().to(self.slot.whole.device)
        found: Tensor = ids.unique()  # type: ignore[no-untyped-call]
        return found[found < self.slot.rows]

    def all_rows(self) -> Tensor:
        return torch.arange(self.slot.rows, device=self.slot.whole.device)

    def sums(self, asked: "_Asked", values: Tensor) -> Tensor:
        """Of gradients that came, as they were asked for, those of the rows of this rank."""
        total = values.new_zeros((self.stop - self.start, *values.shape[1:]))
        # Source by source in the order of ranks: two runs are equal.
        sources = zip(
            torch.split(asked.found, asked.counts), torch.split(values, asked.counts), strict=True
        )
        for numbers, own in sources:
            total.index_add_(0, numbers - self.start, own)
        return total


@dataclass(frozen=True, eq=False)
class _Asked:
    """What owners know of the rows of a table that ranks have."""

    rows: Tensor
    """Of this rank, ascending."""
    owned: list[int]
    """How many of them each rank owns."""
    found: Tensor
    """Numbers of the rows of this rank that others have, rank after rank."""
    counts: list[int]
    """How many of each rank."""


_Counts = Sequence[Sequence[int]]
"""Of each table, rows of each rank."""
_Come = Callable[[], list[Tensor]]


class _Asking:
    """Telling owners which of their rows this rank has: how many, then their numbers. What it takes
    goes on beside what is called in between."""

    def __init__(
        self,
        begin: Callable[[Sequence[Tensor], _Counts, _Counts], _Come],
        tables: Sequence[_OwnedTable],
        rows: list[Tensor],
        ranks: int,
    ) -> None:
        self._begin, self._rows = begin, rows
        self._numbers: _Come | None = None
        if not rows:
            return
        mine = torch.stack([
            torch.bincount(own // table.chunk, minlength=ranks)
            for table, own in zip(tables, rows, strict=True)
        ])  # fmt: skip
        ones = [1] * ranks
        self._owned: list[list[int]] = mine.tolist()
        self._theirs = begin([mine.T.contiguous()], [ones], [ones])

    def tell_numbers(self) -> None:
        """Owners know how many."""
        if self._rows and self._numbers is None:
            (theirs,) = self._theirs()
            self._counts: list[list[int]] = theirs.T.tolist()
            self._numbers = self._begin(self._rows, self._owned, self._counts)

    def end(self) -> list[_Asked]:
        """What they know, when they know all."""
        self.tell_numbers()
        if self._numbers is None:
            return []
        each = zip(self._rows, self._owned, self._numbers(), self._counts, strict=True)
        return [_Asked(*one) for one in each]


class _Owned(SyncRun):
    reads_batches = True

    def __init__(self, tables: Sequence[_OwnedTable], still: Sequence[Slot], lines: Lines) -> None:
        self._lines, self._tables = lines, tuple(tables)
        self._peers = lines.shards
        self.held = (*(table.held for table in tables), *held_whole(still, lines))
        self._stale = False
        """Only what `_fresh` names is as its owners have it."""
        self._fresh: list[Tensor] = []
        self._next: list[Tensor] | None = None
        """Rows that the next batch reads, if that is known; of each table, as all of these."""
        self._announced = False
        """They have come after the last step."""
        self._rows: list[Tensor] | None = None
        """Those that batches of this step read so far; None where nobody said."""
        self._asked: list[_Asked] = []
        """Empty if owners do not know all rows that this step has gradients of."""
        self._asking: _Asking | None = None
        """About the rows of the next batch, while this one is trained on."""
        self._last = min((table.slot.owner for table in tables), default=-1)
        """The call after whose backward all gradients of tables are there."""
        self._coming: _Come | None = None
        """Gradients that are on their way to owners."""

    @property
    def is_settled(self) -> bool:
        return not self._stale

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for table in self._tables:
            table.slot.whole.grad = table.shard.grad = None
        self._rows = None
        self._take(batch, next_batch, announced=self._announced)
        self._announced = False

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._take(batch, next_batch, announced=False)

    def _take(self, batch: Samples | None, next_batch: Samples | None, *, announced: bool) -> None:
        """The rows of a batch are here, or come now; all ranks ask for theirs at once."""
        if batch is None:  # gradients are cleared, and nothing runs
            return
        rows = [table.rows(batch) for table in self._tables]
        if self._stale and not announced:
            self._fetch(rows)
        elif self._stale:
            for table, read, fresh in zip(self._tables, rows, self._fresh, strict=True):
                if not torch.isin(read, fresh).all():
                    raise PlanError(
                        "this batch is not the one that next_batch said would come: its rows of "
                        f"{table.slot.param.fqn} are not here; pass the batches in that order, or "
                        "no next_batch"
                    )
        if self._rows is None:
            self._rows = rows
        else:
            both = map(torch.cat, zip(self._rows, rows, strict=True))
            self._rows = [each.unique() for each in both]  # type: ignore[no-untyped-call]
            self._asked = []
        if self._asking is not None:  # a batch that has come as one more of this step
            self._asking.end()
        self._next = self._asking = None
        if next_batch is not None:
            self._next = [table.rows(next_batch) for table in self._tables]
            self._asking = _Asking(self._begin, self._tables, self._next, self._peers.size)

    def after_backward(self, call: int, last: bool) -> None:
        # Where owners do not know the rows yet, they are told in `finish`.
        if last and call == self._last and self._asked:
            self._coming = self._send_gradients(self._asked)

    @torch.no_grad()
    def _send_gradients(self, asked: list[_Asked]) -> _Come:
        sent = [
            torch.zeros_like(whole[one.rows]) if whole.grad is None else whole.grad[one.rows]
            for one, whole in zip(asked, self._wholes(), strict=True)
        ]
        owned, counts = [one.owned for one in asked], [one.counts for one in asked]
        come = self._begin(sent, owned, counts, "gradients")
        if self._asking is not None:
            self._asking.tell_numbers()  # beside them
        return come

    @torch.no_grad()
    def finish(self) -> None:
        asked = self._asked or self._ask(self._rows, "gradients")
        come, self._coming = self._coming or self._send_gradients(asked), None
        values = come()
        for table, one, came in zip(self._tables, asked, values, strict=True):
            table.slot.whole.grad, table.shard.grad = None, table.sums(one, came)
            sum_over_copies(table.shard.grad, self._lines)
        self._asked = []

    def updated(self, later: Callable[[], Update]) -> None:
        self._stale, self._announced = True, self._next is not None
        if self._next is not None and self._asking is not None:
            asking, self._asking = self._asking, None
            self._fresh, self._asked = self._next, self._fill(asking.end())

    def written(self) -> None:
        self._stale = True
        self.settle()

    def settle(self) -> None:
        if self._stale:
            self._fill(self._ask(None, "parameters"))
            self._stale, self._asked = False, []

    def _fetch(self, rows: list[Tensor]) -> None:
        """These rows become as their owners have them."""
        self._fresh, self._asked = rows, self._fill(self._ask(rows, "parameters"))

    @torch.no_grad()
    def _fill(self, asked: list[_Asked]) -> list[_Asked]:
        """Rows that were asked for come from their owners."""
        wholes = self._wholes()
        sent = [whole[one.found] for one, whole in zip(asked, wholes, strict=True)]
        values = self._exchange(
            sent, [one.counts for one in asked], [one.owned for one in asked], "parameters"
        )
        for one, whole, came in zip(asked, wholes, values, strict=True):
            whole.index_copy_(0, one.rows, came)
        return asked

    def _wholes(self) -> list[Tensor]:
        return [table.slot.whole for table in self._tables]

    def _ask(self, rows: list[Tensor] | None, purpose: Purpose) -> list[_Asked]:
        """Tells owners numbers of their rows that this rank has; None: all."""
        rows = [table.all_rows() for table in self._tables] if rows is None else rows
        begin = partial(self._begin, purpose=purpose)
        return _Asking(begin, self._tables, rows, self._peers.size).end()

    def _exchange(
        self, rows: Sequence[Tensor], sent: _Counts, received: _Counts, purpose: Purpose
    ) -> list[Tensor]:
        return self._begin(rows, sent, received, purpose)()

    def _begin(
        self,
        rows: Sequence[Tensor],
        sent: _Counts,
        received: _Counts,
        purpose: Purpose = "parameters",
    ) -> _Come:
        """Sends rows of each table to each rank in turn, so many as `sent` says, all tables of a
        dtype in one message; what is returned waits for those that come, so many as `received`
        says."""
        if self._peers.group is None:
            return lambda: [x.detach().clone() for x in rows]
        under_way: list[tuple[list[int], _Come]] = []
        for dtype in dict.fromkeys(x.dtype for x in rows):
            own = [index for index, x in enumerate(rows) if x.dtype == dtype]
            out, into = ([of[index] for index in own] for of in (sent, received))
            under_way.append((own, self._send([rows[i] for i in own], out, into, purpose)))

        def come() -> list[Tensor]:
            found: dict[int, Tensor] = {}
            for own, arrive in under_way:
                found |= zip(own, arrive(), strict=True)
            return [found[index] for index in range(len(rows))]

        return come

    def _send(
        self, rows: Sequence[Tensor], sent: _Counts, received: _Counts, purpose: Purpose
    ) -> _Come:
        """`_begin` of one dtype."""
        peers, widths = self._peers, [x.shape[1:].numel() for x in rows]
        pieces = [torch.split(x, list(n)) for x, n in zip(rows, sent, strict=True)]
        flat = torch.cat([x.detach().reshape(-1) for to in zip(*pieces, strict=True) for x in to])
        out, into = (
            [sum(n * w for n, w in zip(of, widths, strict=True)) for of in zip(*each, strict=True)]
            for each in (sent, received)
        )
        came = flat.new_empty(sum(into))
        what = What(purpose, self._lines.stage, peers.axis, "all_to_all", flat.nbytes, peers.size)
        start = self._lines.recorder.mark()
        work = dist.all_to_all_single(came, flat, into, out, group=peers.group, async_op=True)
        assert work is not None
        pending = self._lines.recorder.pending(what, work, start)

        def arrive() -> list[Tensor]:
            pending.wait()
            counts = [n for of in zip(*received, strict=True) for n in of]
            sizes = [n * width for n, width in zip(counts, widths * peers.size, strict=True)]
            parts = torch.split(came, sizes)
            return [
                torch.cat(parts[index :: len(rows)]).view(-1, *x.shape[1:])
                for index, x in enumerate(rows)
            ]

        return arrive
