"""EmbRace with its second schedule: rows that no rank's next batch reads go under the next step (Li
et al. 2022).

As `owned_rows`, and besides: owners know which of their rows any rank asks for next. Gradients of
those rows go at the end of the step, and they are stepped and sent as ever. Gradients of all other
rows are on their way while the next step computes, and their owners step those rows at its end, by
the settings of their own step; before that, if anybody reads them. Each element is stepped once a
step with the sum of all its gradients, so that it is exact for optimizers that step each alone.

Nothing is held back in the first step, where the next batch is not known, where the norm of all
gradients is limited, and where stages share parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Send
from meshwright.forms.owned import AskedRows, OwnedRows
from meshwright.forms.owned_table import OwnedTable, Together, owned_tables
from meshwright.forms.owner_exchange import ID_BYTES, ZERO, ops_of_rows, wrong_owners
from meshwright.forms.row_messages import Arriving
from meshwright.forms.running import LaterStep, Lines, ParameterStore, Samples, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SEARCHED = False
STORE, SPLIT = "owned", True
TABLES = ("rows_each", "row_bytes", "busiest", "prior", "ids")
TABLE_ZERO = ZERO
UNDONE_BY_NORM = "sync owned_rows, or no max_grad_norm"
_SETTINGS: Known = {
    "rows_each": Number(1.0, 1e-9, 1.0), "row_bytes": Number(256, 1, 2**40),
    "busiest": Number(1.0, 1.0, 2**20),
    "prior": Number(0.5, 0.0, 1 - 1e-9), "ids": Text(),
}  # fmt: skip
"""As of `owned_rows`; `prior`: share of a batch's rows that any rank's next one reads."""
_ANSWER_BYTES = 1


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is held and sent: rows that are read next at once, the others a step later."""
    told = FormSettings(_SETTINGS, settings)
    each, row = told.number("rows_each"), told.whole("row_bytes")
    prior = told.number("prior")
    way = {"primitive": Primitive.ALL_TO_ALL, "axis": "dp_shard", "unit": "bucket", "by_rank": True,
           "loaded": "busiest"}  # fmt: skip
    now = {**way, "joint": True}
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            # Blocks have the rows of a batch, and gradients of those.
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1, share="here"),
            Hold(
                kind="gradients",
                since=Event.AFTER_BACKWARD,
                until=Event.NEXT_BEGIN,
                whole=1,
                share="here",
            ),
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            # Owners sum gradients into zeros.
            Rewrite(what="gradients", unit="bucket", at=Event.END, moved=1 / replicas),
            Rewrite(
                what="gradients",
                unit="bucket",
                at=Event.END,
                moved=0.0,
                calls=ops_of_rows(replicas),
            ),
            Send(what="gradients", at=Event.END, until=Event.END, share="first", **now),  # type: ignore[arg-type]
            Send(what="gradients", at=Event.END, until=Event.END, lag=1, share="late", **way),  # type: ignore[arg-type]
            Send(
                what="gradients",
                primitive=Primitive.ALL_REDUCE,
                axis="dp_replicate",
                unit="bucket",
                at=Event.END,
                until=Event.END,
                of_part=True,
            ),
            Send(what="parameters", at=Event.UPDATED, until=Event.UPDATED, share="read", **now),  # type: ignore[arg-type]
        ),
        stated={
            "here": each,
            "busiest": told.number("busiest"),
            "first": each * (prior + _ANSWER_BYTES / row),
            "late": each * (1 - prior),
            "read": each * (1 + ID_BYTES / row),
        },
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_owners("late_rows", _SETTINGS, stage)
    if stage.is_sharded and stage.mesh.get("dp_replicate", 1) > 1:
        yield "late_rows has one owner for each row, and dp_replicate makes copies", "owned_rows"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage, store)], lines)


def build_together(groups: Sequence[Together], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return _LateRows(*owned_tables("late_rows", groups, lines), lines)


@dataclass(eq=False)
class _Unstepped:
    """Rows of a table whose step is not over."""

    total: Tensor
    """Gradients of a rank's own rows, as far as they have come."""
    first: Tensor
    """Rows of this rank that go first, ascending."""
    rows: Tensor
    """Rows of this rank whose gradients are on their way, rank after rank."""
    others: Callable[[Tensor], None] | None = None
    """Steps all rows but the first."""


class _LateRows(OwnedRows):
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
        tables, asked = self._tables, self._asked
        first: list[Tensor] = [one.found.unique() for one in self._coming]  # type: ignore[no-untyped-call]
        is_first = [torch.isin(a.found, f) for a, f in zip(asked, first, strict=True)]
        goes_first = self._start(
            [x.to(torch.uint8) for x in is_first], [one.counts for one in asked],
            [one.owned for one in asked], "gradients",
        ).values()  # fmt: skip
        gradients = [table.gradient() for table in tables]
        now, later = (
            [_some(one, which == late, owners == late) for one, which, owners in zip(
                asked, (torch.cat(x).bool() for x in goes_first), is_first, strict=True)]
            for late in (True, False)
        )  # fmt: skip
        values = self._start(
            [x[part.mine] for x, part in zip(gradients, now, strict=True)],
            [part.owned for part in now], [part.counts for part in now], "gradients",
        ).values()  # fmt: skip
        self._late = []
        for table, own, part, left, came in zip(tables, first, now, later, values, strict=True):
            total = table.total()
            table.add(total, part.found - table.start, came)
            self._late.append(_Unstepped(total, own, left.found))
        self._arriving = self._start(
            [x[part.mine] for x, part in zip(gradients, later, strict=True)],
            [part.owned for part in later], [part.counts for part in later], "gradients",
        )  # fmt: skip

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
            if late.others is not None:
                late.others(late.total)
        self._late, self._arriving = [], Arriving(())


class _Part(NamedTuple):
    """Some of the rows whose gradients a rank has and gets."""

    mine: Tensor
    """Which of those that this rank has."""
    owned: list[int]
    found: Tensor
    counts: list[int]


def _some(asked: AskedRows, mine: Tensor, theirs: Tensor) -> _Part:
    """`mine`, `theirs`: whether a row of this rank is meant, of those that it has and owns."""
    owned, counts = (
        [int(part.sum()) for part in torch.split(which, sizes)]
        for which, sizes in ((mine, asked.owned), (theirs, asked.counts))
    )
    return _Part(mine, owned, asked.found[theirs], counts)
