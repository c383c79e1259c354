"""Ranks that own rows of tables: who reads some asks for them, and sends their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.flat import chunk_rows, frozen, held_whole, sum_over_copies, trainable
from meshwright.forms.rows import torn_rows
from meshwright.forms.running import Held, LaterStep, Lines, Samples, Slot, SyncRun
from meshwright.forms.sync import IDS
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Stage
from meshwright.ir.profile.measured import Purpose


def owned_tables(
    form: str, groups: Sequence[tuple[Sequence[Slot], Stage]], lines: Lines
) -> tuple[list["OwnedTable"], list[Slot]]:
    """Returns the tables of groups of which the stage says different settings, and what is not
    trained. PlanError for a table of which model axes split rows, or that has none."""
    tables, still = [], []
    for slots, stage in groups:
        ids = str(stage.sync.settings.get(IDS, "")) if stage.sync else ""
        for slot in slots:
            if slot.whole.ndim < 2 or slot.whole.shape[0] != slot.param.global_shape[0]:
                raise PlanError(str(torn_rows(form, slot.param.fqn)))
        tables += [OwnedTable(slot, ids, lines) for slot in trainable(slots)]
        still += frozen(slots)
    return tables, still


@dataclass(frozen=True, eq=False)
class AskedRows:
    """What owners know of the rows of a table that ranks have."""

    rows: Tensor
    """Of this rank, ascending."""
    owned: list[int]
    """How many of them each rank owns."""
    found: Tensor
    """Numbers of the rows of this rank that others have, rank after rank."""
    counts: list[int]
    """How many of each rank."""


class OwnedTable:
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
            path = self.slot.param.fqn
            raise PlanError(f"rows of {path} are read from input {self.ids!r}; given are {given}")
        ids = batch[self.ids].detach().to(self.slot.whole.device)
        found: Tensor = ids.unique()  # type: ignore[no-untyped-call]
        return found[found < self.slot.rows]

    def all_rows(self) -> Tensor:
        return torch.arange(self.slot.rows, device=self.slot.whole.device)

    def sums(self, asked: AskedRows, values: Tensor) -> Tensor:
        """Of gradients that came, as they were asked for, those of the rows of this rank."""
        total = values.new_zeros((self.stop - self.start, *values.shape[1:]))
        return self.add(total, asked, values)

    def add(self, total: Tensor, asked: AskedRows, values: Tensor) -> Tensor:
        """Adds more of them to sums, which come back."""
        # Source by source in the order of ranks: two runs are equal.
        sources = zip(
            torch.split(asked.found, asked.counts), torch.split(values, asked.counts), strict=True
        )
        for numbers, own in sources:
            total.index_add_(0, numbers - self.start, own)
        return total


class _Asking:
    """Telling owners which of their rows this rank has: how many, then their numbers. Unless it
    `waits`, that goes on beside what is done in between."""

    def __init__(
        self, run: "OwnedRows", rows: list[Tensor], purpose: Purpose, *, waits: bool
    ) -> None:
        self._rows, self._begin = rows, partial(run._begin, purpose=purpose, waits=waits)
        self._numbers: ArrivingRows | None = None
        if not rows:
            return
        ranks = run._peers.size
        mine = torch.stack([
            torch.bincount(own // table.chunk, minlength=ranks)
            for table, own in zip(run._tables, rows, strict=True)
        ])  # fmt: skip
        ones = [1] * ranks
        self._owned: list[list[int]] = mine.tolist()
        self._theirs = self._begin([mine.T.contiguous()], [ones], [ones])

    def tell_numbers(self) -> None:
        """Owners know how many: which, goes now."""
        if self._rows and self._numbers is None:
            (theirs,) = self._theirs.taken()
            self._counts: list[list[int]] = theirs.T.tolist()
            self._numbers = self._begin(self._rows, self._owned, self._counts)

    def end(self) -> list[AskedRows]:
        """What owners know, when they know all."""
        self.tell_numbers()
        if self._numbers is None:
            return []
        each = zip(self._rows, self._owned, self._numbers.taken(), self._counts, strict=True)
        return [AskedRows(*one) for one in each]


class OwnedRows(SyncRun):
    """Tables of which each rank of dp_shard steps some rows; others have those that they read."""

    reads_batches = True

    def __init__(self, tables: Sequence[OwnedTable], still: Sequence[Slot], lines: Lines) -> None:
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
        self._asked: list[AskedRows] = []
        """Empty if owners do not know all rows that this step has gradients of."""
        self._asking: _Asking | None = None
        """About the rows of the next batch, while this one is trained on."""
        self._last = min((table.slot.owner for table in tables), default=-1)
        """The call after whose backward all gradients of tables are there."""
        self._leaving: tuple[list[AskedRows], ArrivingRows] | None = None
        """Gradients that are on their way to owners, and of which rows."""

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
        if self._asking is not None:  # about a batch that has come as one more of this step
            self._asking.end()
        self._next = self._asking = None
        if next_batch is not None:
            self._next = [table.rows(next_batch) for table in self._tables]
            self._asking = _Asking(self, self._next, "parameters", waits=False)

    def after_backward(self, call: int, last: bool) -> None:
        # Where owners do not know the rows yet, they are told in `finish`.
        if last and call == self._last and self._asked:
            self._leaving = self._leave(waits=False)
            if self._asking is not None:
                self._asking.tell_numbers()  # beside the gradients

    @torch.no_grad()
    def _leave(self, *, waits: bool) -> tuple[list[AskedRows], "ArrivingRows"]:
        """Gradients go to owners."""
        asked = self._known()
        gradients = self._gradients(asked)
        return asked, self._begin(gradients, *_to_owners(asked), "gradients", waits=waits)

    @torch.no_grad()
    def finish(self) -> None:
        (asked, coming), self._leaving = self._leaving or self._leave(waits=True), None
        for table, one, came in zip(self._tables, asked, coming.taken(), strict=True):
            table.slot.whole.grad, table.shard.grad = None, table.sums(one, came)
            sum_over_copies(table.shard.grad, self._lines)

    def _known(self) -> list[AskedRows]:
        """The rows that this step has gradients of."""
        asked, self._asked = self._asked or self._ask(self._rows, "gradients"), []
        return asked

    def _gradients(self, asked: Sequence[AskedRows]) -> list[Tensor]:
        """This replica's of some rows of each table."""
        return [
            torch.zeros_like(whole[one.rows]) if whole.grad is None else whole.grad[one.rows]
            for one, whole in zip(asked, self._wholes(), strict=True)
        ]

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._stale, self._announced = True, self._next is not None
        if self._next is not None:
            self._fresh, self._asked = self._next, self._coming_rows()
            self._answer(self._asked)

    def _coming_rows(self) -> list[AskedRows]:
        """Those that the next batch reads, once their owners know them."""
        assert self._asking is not None
        asked, self._asking = self._asking.end(), None
        return asked

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

    def _fill(self, rows: list[Tensor] | None) -> list[AskedRows]:
        asked = self._ask(rows, "parameters")
        self._answer(asked)
        return asked

    @torch.no_grad()
    def _answer(self, asked: Sequence[AskedRows]) -> None:
        """Owners send what was asked for."""
        wholes = self._wholes()
        sent = [whole[one.found] for one, whole in zip(asked, wholes, strict=True)]
        out, into = _to_owners(asked)
        values = self._exchange(sent, into, out, "parameters")
        for one, whole, came in zip(asked, wholes, values, strict=True):
            whole.index_copy_(0, one.rows, came)

    def _wholes(self) -> list[Tensor]:
        return [table.slot.whole for table in self._tables]

    def _ask(self, rows: list[Tensor] | None, purpose: Purpose) -> list[AskedRows]:
        """Tells owners numbers of their rows that this rank has; None: all."""
        rows = [table.all_rows() for table in self._tables] if rows is None else rows
        return _Asking(self, rows, purpose, waits=True).end()

    def _exchange(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
    ) -> list[Tensor]:
        """Rows of each table to each rank in turn, so many as `sent` says, all tables of a dtype in
        one message; those that came, so many as `received` says."""
        return self._begin(rows, sent, received, purpose, waits=True).taken()

    def _begin(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
        *,
        waits: bool,
    ) -> "ArrivingRows":
        """`_exchange`, whose messages go on meanwhile unless it `waits`."""
        peers = self._peers
        if peers.group is None:
            return ArrivingRows([x.detach().clone() for x in rows], [])
        messages = []
        for dtype in dict.fromkeys(x.dtype for x in rows):
            own = [index for index, x in enumerate(rows) if x.dtype == dtype]
            shares = [list(zip(*(of[i] for i in own), strict=True)) for of in (sent, received)]
            parts = [torch.split(rows[i].detach(), list(sent[i])) for i in own]
            flat = torch.cat([x.reshape(-1) for to in zip(*parts, strict=True) for x in to])
            widths = [rows[i].shape[1:].numel() for i in own]
            out, into = ([sum(map(mul, to, widths)) for to in of] for of in shares)
            came = flat.new_empty(sum(into))
            what = What(
                purpose, self._lines.stage, peers.axis, "all_to_all", flat.nbytes, peers.size
            )
            work: Waitable | None = None
            if waits:
                with self._lines.recorder.collective(what):
                    dist.all_to_all_single(came, flat, into, out, group=peers.group)
            else:
                start = self._lines.recorder.mark()
                work = dist.all_to_all_single(
                    came, flat, into, out, group=peers.group, async_op=True
                )
                assert work is not None
                work = self._lines.recorder.pending(what, work, start)
            sizes = [n * width for of in shares[1] for n, width in zip(of, widths, strict=True)]
            messages.append(_Message(own, flat, came, sizes, work))
        return ArrivingRows(list(rows), messages)


@dataclass(frozen=True, eq=False)
class _Message:
    """Rows of several tables on their way from all ranks."""

    tables: Sequence[int]
    sent: Tensor
    came: Tensor
    sizes: Sequence[int]
    """Values that come of each table, rank after rank."""
    work: Waitable | None
    """None: they have come."""


@dataclass(frozen=True, eq=False)
class ArrivingRows:
    """What is on its way of each table."""

    _like: list[Tensor]
    """As many values in a row; where there is nobody to send to, what has come."""
    _messages: Sequence[_Message]

    @property
    def held(self) -> list[Tensor]:
        return [x for message in self._messages for x in (message.sent, message.came)]

    def taken(self) -> list[Tensor]:
        """Waits for all rows; those of each table, rank after rank."""
        found = list(self._like)
        for message in self._messages:
            if message.work is not None:
                message.work.wait()
            parts, count = torch.split(message.came, list(message.sizes)), len(message.tables)
            for at, index in enumerate(message.tables):
                found[index] = torch.cat(parts[at::count]).view(-1, *self._like[index].shape[1:])
        return found


def _to_owners(asked: Sequence[AskedRows]) -> tuple[list[list[int]], list[list[int]]]:
    """How many rows of each table go to each owner, and come from each rank."""
    return [one.owned for one in asked], [one.counts for one in asked]
