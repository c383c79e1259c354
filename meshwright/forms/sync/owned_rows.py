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
        tables += [_Table(slot, told.word("ids"), lines) for slot in trainable(slots)]
        still += frozen(slots)
    return _Owned(tables, still, lines)


class _Table:
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


class _Owned(SyncRun):
    reads_batches = True

    def __init__(self, tables: Sequence[_Table], still: Sequence[Slot], lines: Lines) -> None:
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
        self._next = None
        if next_batch is not None:
            self._next = [table.rows(next_batch) for table in self._tables]

    @torch.no_grad()
    def finish(self) -> None:
        asked = self._asked or self._ask(self._rows, "gradients")
        sent = [
            torch.zeros_like(whole[one.rows]) if whole.grad is None else whole.grad[one.rows]
            for one, whole in zip(asked, self._wholes(), strict=True)
        ]
        values = self._exchange(
            sent, [one.owned for one in asked], [one.counts for one in asked], "gradients"
        )
        for table, one, came in zip(self._tables, asked, values, strict=True):
            table.slot.whole.grad, table.shard.grad = None, table.sums(one, came)
            sum_over_copies(table.shard.grad, self._lines)
        self._asked = []

    def updated(self, later: Callable[[], Update]) -> None:
        self._stale, self._announced = True, self._next is not None
        if self._next is not None:
            self._fetch(self._next)

    def written(self) -> None:
        self._stale = True
        self.settle()

    def settle(self) -> None:
        if self._stale:
            self._fill(None)
            self._stale, self._asked = False, []

    def _fetch(self, rows: list[Tensor]) -> None:
        """These rows become as their owners have them."""
        self._fresh, self._asked = rows, self._fill(rows)

    @torch.no_grad()
    def _fill(self, rows: list[Tensor] | None) -> list[_Asked]:
        asked, wholes = self._ask(rows, "parameters"), self._wholes()
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
        if not rows:
            return []
        size = self._peers.size
        mine = torch.stack([
            torch.bincount(own // table.chunk, minlength=size)
            for table, own in zip(self._tables, rows, strict=True)
        ])  # fmt: skip
        ones = [1] * size
        (theirs,) = self._exchange([mine.T.contiguous()], [ones], [ones], purpose)
        owned, counts = mine.tolist(), theirs.T.tolist()
        found = self._exchange(rows, owned, counts, purpose)
        return [_Asked(*one) for one in zip(rows, owned, found, counts, strict=True)]

    def _exchange(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
    ) -> list[Tensor]:
        """Rows of each table to each rank in turn, so many as `sent` says, all tables of a dtype in
        one message; those that came, so many as `received` says."""
        if self._peers.group is None:
            return [x.detach().clone() for x in rows]
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in rows):
            own = [index for index, x in enumerate(rows) if x.dtype == dtype]
            parts = self._send(
                [rows[i].detach() for i in own], [sent[i] for i in own], [received[i] for i in own],
                purpose,
            )  # fmt: skip
            found |= zip(own, parts, strict=True)
        return [found[index] for index in range(len(rows))]

    def _send(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
    ) -> list[Tensor]:
        """`_exchange` of one dtype."""
        peers, widths = self._peers, [x.shape[1:].numel() for x in rows]
        pieces = zip(
            *(torch.split(x, list(n)) for x, n in zip(rows, sent, strict=True)), strict=True
        )
        flat = torch.cat([x.reshape(-1) for to in pieces for x in to])
        out, into = (
            [sum(n * w for n, w in zip(of, widths, strict=True)) for of in zip(*all_, strict=True)]
            for all_ in (sent, received)
        )
        came = flat.new_empty(sum(into))
        what = What(purpose, self._lines.stage, peers.axis, "all_to_all", flat.nbytes, peers.size)
        with self._lines.recorder.collective(what):
            dist.all_to_all_single(came, flat, into, out, group=peers.group)
        sizes = [
            n * w for of in zip(*received, strict=True) for n, w in zip(of, widths, strict=True)
        ]
        parts = torch.split(came, sizes)
        return [
            torch.cat(parts[index :: len(rows)]).view(-1, *x.shape[1:])
            for index, x in enumerate(rows)
        ]
