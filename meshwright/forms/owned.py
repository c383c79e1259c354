"""Ranks that own rows of tables: who has a gradient of some sends it, who reads some asks. Nobody
has all of a table."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from meshwright.forms.flat import held_whole, sum_over_copies
from meshwright.forms.owned_table import OwnedTable
from meshwright.forms.owner_copies import RowsOfCopies, sum_rows_over_copies
from meshwright.forms.row_messages import Arriving, start_parts
from meshwright.forms.rows_here import NamedRows, RowsHere
from meshwright.forms.running import (
    Found,
    Held,
    LaterStep,
    Lines,
    Samples,
    Slot,
    SomeRows,
    SyncRun,
)
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.measured import Purpose


@dataclass(frozen=True, eq=False)
class AskedRows:
    """What owners know of the rows of a table that ranks want."""

    named: NamedRows
    """Of this rank."""
    owned: list[int]
    """How many of them each rank owns."""
    found: Tensor
    """Numbers of the rows of this rank that ranks want, rank after rank."""
    counts: list[int]
    """How many each."""
    every: Tensor
    """Those that ranks of any copy of this one want, each once and ascending; `found` where there
    are no copies."""

    @property
    def rows(self) -> Tensor:
        """Those of this rank, ascending."""
        return self.named.rows


_Counts = Sequence[Sequence[int]]
"""Of each table, rows of each rank."""
_Start = Callable[[Sequence[Tensor], _Counts, _Counts], Arriving]


_ToCopies = Callable[[Sequence[Tensor]], RowsOfCopies]


class _Asking:
    """Telling owners which of their rows this rank wants: how many, then their numbers; then they
    tell their copies. What it takes goes on beside what is called in between."""

    def __init__(
        self,
        start: _Start,
        to_copies: _ToCopies,
        tables: Sequence[OwnedTable],
        named: Sequence[NamedRows],
    ) -> None:
        size, self._start, self._to_copies, self._named = tables[0].owners, start, to_copies, named
        self._numbers: Arriving | None = None
        self._of_copies: RowsOfCopies | None = None
        self._known: list[AskedRows] | None = None
        if size == 1:  # who is alone asks itself
            self._owned = self._counts = [[len(x.rows)] for x in named]
            self._found = [x.rows for x in named]
            self._of_copies = to_copies(self._found)
            return
        each = list(zip(tables, named, strict=True))
        mine = torch.stack([table.counts(own.rows) for table, own in each])
        self._told = [table.told(own.rows) for table, own in each]
        ones = [1] * size
        self._owned = mine.tolist()
        self._theirs = start([mine.T.contiguous()], [ones], [ones])

    def go_on(self) -> None:
        """Owners get to know numbers, unless they know."""
        if self._of_copies is None:
            self._tell_numbers()

    def _tell_numbers(self) -> Arriving:
        """Owners get to know them, once they know how many."""
        if self._numbers is None:
            (theirs,) = self._theirs.values()
            self._counts = torch.cat(theirs).T.tolist()
            self._numbers = self._start(self._told, self._owned, self._counts)
        return self._numbers

    def end(self) -> list[AskedRows]:
        """What they know, when they know all."""
        if self._known is not None:
            return self._known
        if self._of_copies is None:
            self._found = [torch.cat(of) for of in self._tell_numbers().values()]
            self._of_copies = self._to_copies(self._found)
        each = zip(
            self._named, self._owned, self._found, self._counts, self._of_copies.end(), strict=True
        )
        self._known = [AskedRows(*one) for one in each]
        return self._known


class OwnedRows(SyncRun):
    """Tables of which each rank of dp_shard steps some rows, in turn."""

    reads_batches = True

    def __init__(self, tables: Sequence[OwnedTable], still: Sequence[Slot], lines: Lines) -> None:
        """`still`: parameters that are not trained."""
        self._lines, self._tables = lines, tuple(tables)
        self.held = (*(table.held for table in tables), *held_whole(still, lines))
        self._by_path = {table.path: table for table in self._tables}
        self._asked: list[AskedRows] = []
        """Of the rows that blocks have; empty where they have none."""
        self._asking: _Asking | None = None
        """About rows that the next batch reads, if that is known, while this one is trained on."""
        self._depth = max((table.depth for table in tables), default=0)
        self._after: list[Samples] = []
        """Batches after the next one."""
        self._later: deque[_Asking] = deque()
        """About rows that they read."""
        self._foreseen = 0
        """Batches that come of which tables have been told."""
        self._widened = False
        """Blocks have rows besides, of which only the loss was wanted."""
        self._announced = False
        """They have come after the last step."""
        self._last = min((table.slot.owner for table in tables), default=-1)
        """The call after whose backward all gradients of tables are there."""
        self._some: list[SomeRows] = []
        self._reduced: tuple[Held, ...] = ()
        self._leaving: Arriving | None = None
        """Gradients on their way to owners."""

    def rows_here(self, path: str) -> RowsHere | None:
        table = self._by_path.get(path)
        return None if table is None else table.here

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for table in self._tables:
            table.slot.whole.grad = table.shard.grad = None
        self._some, self._reduced = [], ()
        announced, self._announced = self._announced, False
        if batch is None or not announced:
            self._ask_no_more()
        if batch is None:  # gradients are cleared, and nothing runs
            self._drop()
            for table in self._tables:
                table.flush()
                table.forget()
            return
        if announced:
            self._are_here(batch)
            if self._widened and any(t.caches for t in self._tables):
                self._fetch(self._read(batch), trained=False)
        else:
            self._fetch(self._read(batch))
        self._ask_ahead(next_batch)

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._ask_no_more()
        if batch is not None:
            self._widen(batch, trained=True)
            self._ask_ahead(next_batch)

    def coming(self, batches: Sequence[Samples]) -> None:
        self._after = list(batches)

    def _ask_ahead(self, next_batch: Samples | None) -> None:
        if next_batch is None:
            self._ask_no_more()
            return
        if self._later:
            self._asking = self._later.popleft()
        else:
            self._asking = self._begin_to_ask(self._read(next_batch), "parameters")
        for batch in self._after[len(self._later) : max(0, self._depth - 1)]:
            self._later.append(self._begin_to_ask(self._read(batch), "parameters"))
        if self._depth:
            self._foresee([self._asking, *self._later])

    def _foresee(self, asking: Sequence[_Asking]) -> None:
        """Tables are told of batches that they have not been told of."""
        for one in asking[self._foreseen :]:
            for table, asked in zip(self._tables, one.end(), strict=True):
                table.foresee(asked.every)
        self._foreseen = len(asking)

    def _ask_no_more(self) -> None:
        """What was asked for is of no use."""
        for asking in (self._asking, *self._later):
            if asking is not None:
                asking.end()
        if self._foreseen:
            for table in self._tables:
                table.over()
        self._asking, self._foreseen = None, 0
        self._later.clear()

    def look_up(self, batch: Samples) -> None:
        self._widen(batch, trained=False)
        self._widened = True

    def _widen(self, batch: Samples, *, trained: bool) -> None:
        before = [(t.here.rows, t.slot.whole.grad) for t in self._tables]
        rows = self._read(batch)
        both = [torch.cat([own, x.rows]) for (own, _), x in zip(before, rows, strict=True)]
        every = [x.unique() for x in both]  # type: ignore[no-untyped-call]
        self._fetch([NamedRows(x) for x in every], trained=trained)
        for table, (own, gradient) in zip(self._tables, before, strict=True):
            if gradient is not None:
                found = torch.zeros_like(table.slot.whole.detach())
                found.index_copy_(0, torch.searchsorted(table.here.rows, own), gradient)
                table.slot.whole.grad = found

    def _read(self, batch: Samples) -> list[NamedRows]:
        return [table.rows(batch) for table in self._tables]

    def _are_here(self, batch: Samples) -> None:
        for table in self._tables:
            if not table.has_all(batch):
                raise PlanError(
                    "this batch is not the one that next_batch said would come: its rows of "
                    f"{table.path} are not here; pass the batches in that order, or no next_batch"
                )

    def after_backward(self, call: int, last: bool) -> None:
        if last and call == self._last and self._asked:
            self._leaving = self._leave(self._asked)

    def _leave(self, asked: Sequence[AskedRows]) -> Arriving:
        """Gradients go to owners, then numbers of the next batch's rows, beside them."""
        each = list(zip(self._tables, asked, strict=True))
        leaving = start_parts(
            self._lines,
            [table.parted(table.gradient(), one.owned) for table, one in each],
            [[(n, *table.shard.shape[1:]) for n in one.counts] for table, one in each],
            "gradients",
        )
        if self._asking is not None:
            self._asking.go_on()
        return leaving

    @torch.no_grad()
    def finish(self) -> None:
        asked = self._asked or self._ask([t.here.named for t in self._tables], "gradients")
        leaving, self._leaving = self._leaving or self._leave(asked), None
        arrived = leaving.values()
        del leaving  # and with it what was sent
        self._some = []
        rows: list[tuple[OwnedTable, Tensor, Sequence[Tensor]]] = []
        for table, one, came in zip(self._tables, asked, arrived, strict=True):
            table.slot.whole.grad = table.shard.grad = None
            if table.slot.param.sum_over:
                # Ranks along model axes have gradients of other rows, which are added to these.
                table.shard.grad = table.total()
                table.add(table.shard.grad, one.found - table.start, came)
                sum_over_copies(table.shard.grad, self._lines)
            elif self._lines.copies.size > 1:
                own = came[0].new_zeros((len(one.every), *came[0].shape[1:]))
                table.add(own, torch.searchsorted(one.every, one.found), came)
                rows.append((table, one.every, [own]))
            else:
                rows.append((table, one.found, came))
        self._some = [table.summed(own, x) for table, own, x in self._over_copies(rows)]
        replaced = {id(some.of): some.part for some in self._some}
        self._reduced = tuple(
            replace(held, tensor=replaced[id(held.tensor)], rows=None)
            if id(held.tensor) in replaced
            else held
            for held in self.held
        )

    def _over_copies(
        self, rows: list[tuple[OwnedTable, Tensor, Sequence[Tensor]]]
    ) -> list[tuple[OwnedTable, Tensor, Sequence[Tensor]]]:
        """The same, summed over copies, if there are any."""
        if self._lines.copies.size == 1 or not rows:
            return rows
        sums = sum_rows_over_copies([own for _, _, (own,) in rows], self._lines)
        return [(table, own, [x]) for (table, own, _), x in zip(rows, sums, strict=True)]

    @property
    def reduced(self) -> tuple[Held, ...]:
        return self._reduced if self._some else self.held

    @property
    def some_rows(self) -> tuple[SomeRows, ...]:
        return tuple(self._some)

    def spread(self) -> None:
        for some in self._some:
            some.spread()
        self._some, self._reduced = [], ()

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._some, self._reduced = [], ()
        self._announced = self._asking is not None
        if self._asking is None:
            self._drop()
        else:
            asking, self._asking = self._asking, None
            self._foreseen = max(0, self._foreseen - 1)
            self._answer(asking.end(), trained=True)

    def written(self) -> None:
        self._announced = False
        self._drop()
        for table in self._tables:
            table.forget()

    def watch(self, state: Callable[[Tensor], Mapping[str, Tensor]]) -> None:
        for table in self._tables:
            table.watch(state)

    @property
    def is_settled(self) -> bool:
        return all(table.is_flushed for table in self._tables)

    def settle(self) -> None:
        for table in self._tables:
            table.flush()

    @property
    def kept(self) -> list[Tensor]:
        return [x for table in self._tables for x in table.kept]

    @property
    def on_host(self) -> list[Tensor]:
        return [x for table in self._tables for x in table.on_host]

    @property
    def found(self) -> tuple[Found, ...]:
        return tuple(found for table in self._tables for found in table.found)

    def _drop(self) -> None:
        """What blocks have is no longer as its owners have it."""
        self._asked = []
        for table in self._tables:
            table.drop()

    def _fetch(self, rows: Sequence[NamedRows], *, trained: bool = True) -> None:
        """Blocks get these rows."""
        self._answer(self._ask(rows, "parameters"), trained=trained)

    @torch.no_grad()
    def _answer(self, asked: list[AskedRows], *, trained: bool = True) -> None:
        """Owners send what they were asked for."""
        self._asked, self._widened = asked, False
        each = list(zip(self._tables, asked, strict=True))
        for table, one in each if trained else ():
            table.admit(one.every)
        arriving = start_parts(
            self._lines,
            [torch.split(table.owned(one.found), one.counts) for table, one in each],
            [table.coming(one.owned) for table, one in each],
            "parameters",
        )
        for (table, one), parts in zip(each, arriving.values(), strict=True):
            table.put(one.named, table.joined(parts))

    def _ask(self, rows: Sequence[NamedRows], purpose: Purpose) -> list[AskedRows]:
        """Owners get to know numbers of their rows that this rank wants."""
        return self._begin_to_ask(rows, purpose).end()

    def _begin_to_ask(self, rows: Sequence[NamedRows], purpose: Purpose) -> _Asking:
        to_copies = partial(RowsOfCopies, lines=self._lines, purpose=purpose)
        return _Asking(partial(self._start, purpose=purpose), to_copies, self._tables, rows)

    def _start(
        self, rows: Sequence[Tensor], sent: _Counts, received: _Counts, purpose: Purpose
    ) -> Arriving:
        """Sends rows of each table to each rank in turn, so many as `sent` says; so many as
        `received` says come."""
        return start_parts(
            self._lines,
            [torch.split(x.detach(), list(n)) for x, n in zip(rows, sent, strict=True)],
            [[(n, *x.shape[1:]) for n in of] for x, of in zip(rows, received, strict=True)],
            purpose,
        )
