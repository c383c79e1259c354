"""Owners of a table's rows, or of its columns, that step what the next batch reads at once, and all
else under the next step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.forms.flat import sum_over_copies
from meshwright.forms.owned import AskedRows, OwnedRows
from meshwright.forms.owned_table import OwnedTable
from meshwright.forms.owner_copies import sum_rows_over_copies
from meshwright.forms.row_messages import Arriving, start_parts
from meshwright.forms.running import LaterStep, Lines, Samples, Slot


@dataclass(eq=False)
class _Unstepped:
    """Rows of a table whose step is not over."""

    total: Tensor
    """Gradients of a rank's own rows, as far as they have come."""
    first: Tensor
    """Rows of this rank that were summed first, ascending."""
    rows: Tensor
    """Rows of this rank whose gradients are on their way, rank after rank."""
    others: Callable[[Tensor], None] | None = None
    """Steps all rows but the first."""


class LateRows(OwnedRows):
    """Gradients of rows that a batch of any rank reads next go first; all others are on their way
    while the next step computes."""

    whole_updates = False

    def __init__(self, tables: Sequence[OwnedTable], still: Sequence[Slot], lines: Lines) -> None:
        super().__init__(tables, still, lines)
        self._late: list[_Unstepped] = []
        """Of each table; empty if nothing is late."""
        self._arriving = Arriving(())
        self._coming: list[AskedRows] = []
        """What the next batch reads."""
        # Sums over model axes, too, are made of whole gradients, before the step.
        self._holds_back = not any(table.slot.param.sum_over for table in self._tables)
        self._has_stepped = False
        """Optimizers make their state in the first step."""

    def hold_nothing_back(self) -> None:
        self._holds_back = False

    @property
    def is_settled(self) -> bool:
        return not self._late

    @property
    def kept(self) -> list[Tensor]:
        return [*(late.total for late in self._late), *self._arriving.kept]

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        if not self._announced:
            self.settle()
        super().begin(batch, next_batch)

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self.settle()
        super().more(batch, next_batch)

    def after_backward(self, call: int, last: bool) -> None:
        """Nothing leaves before the last step is over, and it is known which rows go first."""

    @torch.no_grad()
    def finish(self) -> None:
        self.settle()
        if self._asking is None or not (self._holds_back and self._has_stepped):
            super().finish()
            return
        self._coming, self._asking = self._asking.end(), None
        self._some, self._reduced = [], ()
        self._split()
        for table in self._tables:
            table.slot.whole.grad = table.shard.grad = None

    def _split(self) -> None:
        """Sums the rows that any rank reads next, and lets the others go."""
        tables = self._tables
        first = [one.every.unique() for one in self._coming]  # type: ignore[no-untyped-call]
        is_first = [torch.isin(one.found, f) for one, f in zip(self._asked, first, strict=True)]
        each = list(zip(tables, self._asked, self._told_first(is_first), is_first, strict=True))
        now = [_Part.of(table, one, mine, theirs) for table, one, mine, theirs in each]
        later = [_Part.of(table, one, ~mine, ~theirs) for table, one, mine, theirs in each]
        gradients = [table.gradient() for table in tables]
        came = self._go(gradients, now).values()
        totals = [table.total() for table in tables]
        for table, total, part, values in zip(tables, totals, now, came, strict=True):
            table.add(total, part.found - table.start, values)
        self._sum_over_copies(totals, first)
        self._late = [
            _Unstepped(*one)
            for one in zip(totals, first, (part.found for part in later), strict=True)
        ]
        self._arriving = self._go(gradients, later)

    def _told_first(self, is_first: Sequence[Tensor]) -> list[Tensor]:
        """Of each table, which rows of this rank go first, as their owners say; `is_first`: of all
        that were asked of this one."""
        each = list(zip(self._asked, is_first, strict=True))
        if all(table.knows_all for table in self._tables):
            own = self._lines.shards.coordinate
            return [torch.split(which, one.counts)[own] for one, which in each]
        told = self._start(
            [which.to(torch.uint8) for which in is_first], [one.counts for one in self._asked],
            [one.owned for one in self._asked], "gradients",
        )  # fmt: skip
        return [torch.cat(of).bool() for of in told.values()]

    def _go(self, gradients: Sequence[Tensor], parts: Sequence["_Part"]) -> Arriving:
        """Some rows of each table go to their owners."""
        each = list(zip(self._tables, gradients, parts, strict=True))
        return start_parts(
            self._lines,
            [table.parted(x[part.mine], part.owned) for table, x, part in each],
            [[(n, *table.shard.shape[1:]) for n in part.counts] for table, _, part in each],
            "gradients",
        )

    def _sum_over_copies(self, totals: Sequence[Tensor], first: Sequence[Tensor]) -> None:
        """Sums of the first rows become those of all copies."""
        if self._lines.copies.group is None:
            return
        each = zip(self._tables, totals, first, strict=True)
        own = [(total, rows - table.start) for table, total, rows in each]
        sums = sum_rows_over_copies([total[rows] for total, rows in own], self._lines)
        for (total, rows), x in zip(own, sums, strict=True):
            total.index_copy_(0, rows, x)

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._has_stepped = True
        if not self._late:
            super().updated(later)
            return
        update = later()
        for table, late in zip(self._tables, self._late, strict=True):
            if table.shard.numel():
                own = late.first - table.start
                late.others = update.in_parts(table.shard, own, late.total[own])
        self._answer(self._coming)
        self._announced = True

    def settle(self) -> None:
        """All rows have taken the last step."""
        if not self._late:
            return
        values = self._arriving.values()
        for table, late, came in zip(self._tables, self._late, values, strict=True):
            table.add(late.total, late.rows - table.start, came)
            # First rows are summed again, but whoever steps all leaves those as they are.
            sum_over_copies(late.total, self._lines)
            if late.others is not None:
                late.others(late.total)
        self._late, self._arriving = [], Arriving(())


@dataclass(frozen=True, eq=False)
class _Part:
    """Some of the rows of a table whose gradients a rank has and gets."""

    mine: Tensor
    """Which of those that this rank has."""
    owned: list[int]
    """How many of them each rank owns."""
    found: Tensor
    """Those that come, rank after rank."""
    counts: list[int]

    @classmethod
    def of(cls, table: OwnedTable, asked: AskedRows, mine: Tensor, theirs: Tensor) -> "_Part":
        """`mine`, `theirs`: whether a row is meant, of those of this rank and those asked of it."""
        owned: list[int] = table.counts(asked.rows[mine]).tolist()
        counts = [int(part.sum()) for part in torch.split(theirs, asked.counts)]
        return cls(mine, owned, asked.found[theirs], counts)
