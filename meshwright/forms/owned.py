"""Ranks that own rows of tables: who has a gradient of some sends it, who reads some asks. Nobody
has all of a table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.flat import chunk_rows, held_whole, sum_over_copies
from meshwright.forms.rows import torn_rows
from meshwright.forms.running import Held, LaterStep, Lines, Samples, Slot, SyncRun
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.measured import Purpose


def check_whole(form: str, slots: Sequence[Slot]) -> None:
    """PlanError for a table of which model axes split rows, or that has none."""
    for slot in slots:
        if slot.whole.ndim < 2 or slot.whole.shape[0] != slot.param.global_shape[0]:
            raise PlanError(str(torn_rows(form, slot.param.fqn)))


class OwnedTable:
    """A table on one rank: rows that it owns, and those that its blocks read now."""

    def __init__(self, form: str, slot: Slot, ids: str, lines: Lines) -> None:
        """`ids`: the input that names the rows."""
        size, whole = lines.shards.size, slot.whole.detach()
        self.slot, self.path = slot, slot.param.fqn
        self._form, self._ids = form, ids
        self.count, self.chunk = slot.rows, -(-slot.rows // size)
        self.start, self.stop = chunk_rows(slot.rows, size, lines.shards.coordinate)
        self.shard = nn.Parameter(whole[self.start : self.stop].clone())
        primary = lines.is_primary(slot.param, "dp_replicate")
        self.held = Held(slot.param, lines.stage, self.shard, (self.start, self.stop), primary)
        self.here = torch.empty(0, dtype=torch.int64)
        """Numbers of the rows that blocks have, ascending."""
        self.drop()

    def rows(self, batch: Samples) -> Tensor:
        """Those that a batch of this rank reads, ascending."""
        if self._ids not in batch:
            given = ", ".join(batch)
            raise PlanError(f"{self._form} reads rows from input {self._ids!r}; given are {given}")
        ids = batch[self._ids].detach().to(self.shard.device)
        found: Tensor = ids.unique()  # type: ignore[no-untyped-call]
        return found[(found >= 0) & (found < self.count)]

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Blocks have these rows from now on, and no gradient of them."""
        self.slot.whole.grad = None
        self.here, self.slot.whole.data = rows, values

    def drop(self) -> None:
        """Blocks have none."""
        device = self.shard.device
        nothing = self.shard.detach().new_empty((0, *self.shard.shape[1:]))
        self.put(torch.empty(0, dtype=torch.int64, device=device), nothing)

    def owned(self, rows: Tensor) -> Tensor:
        """Values of some rows of this rank."""
        return self.shard.detach().index_select(0, rows - self.start)

    def gradient(self) -> Tensor:
        """Of the rows that blocks have, as far as it has been summed."""
        whole = self.slot.whole
        return torch.zeros_like(whole.detach()) if whole.grad is None else whole.grad

    def total(self) -> Tensor:
        """Zeros, to sum gradients of this rank's own rows in."""
        return torch.zeros_like(self.shard.detach())

    def add(self, total: Tensor, rows: Tensor, counts: Sequence[int], values: Tensor) -> None:
        """Adds gradients of some rows that came, so many from each rank."""
        # Source by source in the order of ranks: two runs are equal.
        parts = zip(torch.split(rows, list(counts)), torch.split(values, list(counts)), strict=True)
        for own, x in parts:
            total.index_add_(0, own - self.start, x)


@dataclass(frozen=True, eq=False)
class Asked:
    """What owners know of the rows of a table that ranks want."""

    rows: Tensor
    """Of this rank, ascending."""
    owned: list[int]
    """How many of them each rank owns."""
    found: Tensor
    """Numbers of the rows of this rank that ranks want, rank after rank."""
    counts: list[int]
    """How many each."""


@dataclass(frozen=True, eq=False)
class _Message:
    """Rows of one dtype that are on their way."""

    tables: list[int]
    came: Tensor
    sizes: list[int]
    """Of the parts of each table from each rank, in the order in which they lie."""
    shapes: list[tuple[int, ...]]
    """Of a row of each table."""
    sent: Tensor
    work: Waitable | None

    def values(self) -> list[Tensor]:
        """Waits; of each table the rows that came, rank after rank."""
        if self.work is not None:
            self.work.wait()
        parts = torch.split(self.came, self.sizes)
        return [
            torch.cat(parts[number :: len(self.shapes)]).view(-1, *shape)
            for number, shape in enumerate(self.shapes)
        ]


class Arriving:
    """Rows of several tables that are on their way."""

    def __init__(self, messages: Sequence[_Message]) -> None:
        self._messages = tuple(messages)

    @property
    def kept(self) -> list[Tensor]:
        """What must stay until they have arrived."""
        return [x for message in self._messages for x in (message.came, message.sent)]

    def values(self) -> list[Tensor]:
        """Waits; of each table the rows that came, rank after rank."""
        found = {
            table: x for message in self._messages
            for table, x in zip(message.tables, message.values(), strict=True)
        }  # fmt: skip
        return [found[table] for table in sorted(found)]


class OwnedRows(SyncRun):
    """Tables of which each rank of dp_shard steps some rows, in turn."""

    reads_batches = True

    def __init__(self, tables: Sequence[OwnedTable], still: Sequence[Slot], lines: Lines) -> None:
        """`still`: parameters that are not trained."""
        self._lines, self._tables = lines, tuple(tables)
        self._peers = lines.shards
        self.held = (*(table.held for table in tables), *held_whole(still, lines))
        self._by_path = {table.path: table for table in self._tables}
        self._asked: list[Asked] = []
        """Of the rows that blocks have; empty where they have none."""
        self._next: list[Tensor] | None = None
        """Rows that the next batch reads, if that is known; of each table, as all of these."""
        self._announced = False
        """They have come after the last step."""

    def rows_here(self, path: str) -> Tensor | None:
        table = self._by_path.get(path)
        return None if table is None else table.here

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for table in self._tables:
            table.slot.whole.grad = table.shard.grad = None
        announced, self._announced, self._next = self._announced, False, None
        if batch is None:  # gradients are cleared, and nothing runs
            self._drop()
            return
        rows = self._read(batch)
        if announced:
            self._are_here(rows)
        else:
            self._fetch(rows)
        self._next = None if next_batch is None else self._read(next_batch)

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._next = None
        if batch is not None:
            self.look_up(batch)
            self._next = None if next_batch is None else self._read(next_batch)

    def look_up(self, batch: Samples) -> None:
        before = [(t.here, t.slot.whole.grad) for t in self._tables]
        rows = self._read(batch)
        both = [torch.cat([own, more]) for (own, _), more in zip(before, rows, strict=True)]
        self._fetch([x.unique() for x in both])  # type: ignore[no-untyped-call]
        for table, (own, gradient) in zip(self._tables, before, strict=True):
            if gradient is not None:
                found = torch.zeros_like(table.slot.whole.detach())
                found.index_copy_(0, torch.searchsorted(table.here, own), gradient)
                table.slot.whole.grad = found

    def _read(self, batch: Samples) -> list[Tensor]:
        return [table.rows(batch) for table in self._tables]

    def _are_here(self, rows: Sequence[Tensor]) -> None:
        for table, read in zip(self._tables, rows, strict=True):
            if not torch.isin(read, table.here).all():
                raise PlanError(
                    "this batch is not the one that next_batch said would come: its rows of "
                    f"{table.path} are not here; pass the batches in that order, or no next_batch"
                )

    @torch.no_grad()
    def finish(self) -> None:
        asked = self._asked or self._ask([table.here for table in self._tables], "gradients")
        values = self._exchange(
            [table.gradient() for table in self._tables], [one.owned for one in asked],
            [one.counts for one in asked], "gradients",
        )  # fmt: skip
        for table, one, came in zip(self._tables, asked, values, strict=True):
            table.slot.whole.grad, table.shard.grad = None, table.total()
            table.add(table.shard.grad, one.found, one.counts, came)
            sum_over_copies(table.shard.grad, self._lines)

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._announced = self._next is not None
        if self._next is not None:
            self._fetch(self._next)
        else:
            self._drop()

    def written(self) -> None:
        self._announced = False
        self._drop()

    def _drop(self) -> None:
        """What blocks have is no longer as its owners have it."""
        self._asked = []
        for table in self._tables:
            table.drop()

    def _fetch(self, rows: Sequence[Tensor]) -> None:
        """Blocks get these rows."""
        self._answer(self._ask(rows, "parameters"))

    @torch.no_grad()
    def _answer(self, asked: list[Asked]) -> None:
        """Owners send what they were asked for."""
        self._asked = asked
        values = self._exchange(
            [table.owned(one.found) for table, one in zip(self._tables, asked, strict=True)],
            [one.counts for one in asked], [one.owned for one in asked], "parameters",
        )  # fmt: skip
        for table, one, came in zip(self._tables, asked, values, strict=True):
            table.put(one.rows, came)

    def _ask(self, rows: Sequence[Tensor], purpose: Purpose) -> list[Asked]:
        """Tells owners numbers of their rows that this rank wants."""
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
        return [Asked(*one) for one in zip(rows, owned, found, counts, strict=True)]

    def _exchange(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
    ) -> list[Tensor]:
        """Returns the rows that came, as `_start` sends them."""
        return self._start(rows, sent, received, purpose, waits=True).values()

    def _start(
        self,
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
        *,
        waits: bool = False,
    ) -> Arriving:
        """Sends rows of each table to each rank in turn, so many as `sent` says, all tables of a
        dtype in one message; so many as `received` says come."""
        messages = []
        for dtype in dict.fromkeys(x.dtype for x in rows):
            own = [index for index, x in enumerate(rows) if x.dtype == dtype]
            out, into = ([counts[index] for index in own] for counts in (sent, received))
            messages.append(
                self._message(own, [rows[i].detach() for i in own], out, into, purpose, waits)
            )
        return Arriving(messages)

    def _message(
        self,
        tables: list[int],
        rows: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        purpose: Purpose,
        waits: bool,
    ) -> _Message:
        """One message to each rank: its rows of each table, one after the other."""
        peers, shapes = self._peers, [tuple(x.shape[1:]) for x in rows]
        widths = [x.shape[1:].numel() for x in rows]
        pieces = [torch.split(x, list(n)) for x, n in zip(rows, sent, strict=True)]
        flat = torch.cat([x.reshape(-1) for to in zip(*pieces, strict=True) for x in to])
        out, into = (
            [[n * w for n, w in zip(of, widths, strict=True)] for of in zip(*counts, strict=True)]
            for counts in (sent, received)
        )
        sizes = [size for of in into for size in of]
        if peers.group is None:
            return _Message(tables, flat, sizes, shapes, flat, None)
        came = flat.new_empty(sum(sizes))
        what = What(purpose, self._lines.stage, peers.axis, "all_to_all", flat.nbytes, peers.size)
        comes, goes = list(map(sum, into)), list(map(sum, out))
        recorder = self._lines.recorder
        if waits:
            with recorder.collective(what):
                dist.all_to_all_single(came, flat, comes, goes, group=peers.group)
            return _Message(tables, came, sizes, shapes, flat, None)
        start = recorder.mark()
        work = dist.all_to_all_single(came, flat, comes, goes, group=peers.group, async_op=True)
        assert work is not None
        pending = recorder.pending(what, work, start)
        return _Message(tables, came, sizes, shapes, flat, pending)
