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

import torch
from torch import Tensor

from meshwright.forms.exchange import Event, Exchange, Hold, Send
from meshwright.forms.owned import ArrivingRows, AskedRows, OwnedRows, OwnedTable, owned_tables
from meshwright.forms.running import LaterStep, Lines, ParameterStore, Samples, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text, wrong_settings
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SEARCHED = False
TABLES = ("rows_each", "row_bytes", "prior", "ids")
TABLE_ZERO = 1
UNDONE_BY_NORM = "sync owned_rows, or no max_grad_norm"
_SETTINGS: Known = {
    "rows_each": Number(1.0, 1e-9, 1.0), "row_bytes": Number(256, 1, 2**40),
    "prior": Number(0.5, 0.0, 1 - 1e-9), "ids": Text(),
}  # fmt: skip
"""As of `owned_rows`; `prior`: share of a batch's rows that any rank's next one reads."""
_ID_BYTES, _ANSWER_BYTES = 8, 1


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is held and sent: rows that are read next at once, the others a step later."""
    told = FormSettings(_SETTINGS, settings)
    each, row = told.number("rows_each"), told.whole("row_bytes")
    prior = told.number("prior")
    way = {"primitive": Primitive.ALL_TO_ALL, "axis": "dp_shard", "unit": "bucket", "by_rank": True}
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            Send(what="gradients", at=Event.END, until=Event.END, share="first", **way),  # type: ignore[arg-type]
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
            Send(what="parameters", at=Event.UPDATED, until=Event.UPDATED, share="read", **way),  # type: ignore[arg-type]
        ),
        stated={
            "first": each * (prior + _ANSWER_BYTES / row),
            "late": each * (1 - prior),
            "read": each * (1 + _ID_BYTES / row),
        },
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    said = stage.sync.settings if stage.sync else {}
    yield from wrong_settings("late_rows", _SETTINGS, said)
    if stage.zero != TABLE_ZERO:
        yield f"late_rows gives each rank rows to step, and zero is {stage.zero}", "zero 1"
    elif stage.dp > 1 and not stage.is_sharded:
        yield "late_rows shares rows out over dp_shard, which is 1", f"dp_shard {stage.dp}"
    elif stage.mesh.get("dp_replicate", 1) > 1:
        yield "late_rows has one owner for each row, and dp_replicate makes copies", "owned_rows"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage)], lines)


def build_together(groups: Sequence[tuple[Sequence[Slot], Stage]], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return _LateRows(*owned_tables("late_rows", groups, lines), lines)


@dataclass(eq=False)
class _Unstepped:
    """Rows of a table whose step is not over."""

    total: Tensor
    """Gradients of a rank's own rows, as far as they have come."""
    first: Tensor
    """Rows of this rank that go first; ascending."""
    asked: AskedRows
    """Those whose gradients are on their way."""
    others: Callable[[Tensor], None] | None = None
    """Steps all rows but the first."""


class _LateRows(OwnedRows):
    whole_updates = False

    def __init__(self, tables: Sequence[OwnedTable], still: Sequence[Slot], lines: Lines) -> None:
        super().__init__(tables, still, lines)
        self._late: list[_Unstepped] = []
        """Of each table, or empty: the last step is over."""
        self._arriving: ArrivingRows | None = None
        self._coming: list[AskedRows] = []
        """The rows that the next batch reads."""
        # Sums over model axes, too, are made of whole gradients, before the step.
        self._holds_back = not any(table.slot.param.sum_over for table in tables)
        self._has_stepped = False
        """Optimizers make their state in the first step."""

    def hold_nothing_back(self) -> None:
        self._holds_back = False

    @property
    def is_settled(self) -> bool:
        return super().is_settled and not self._late

    @property
    def kept(self) -> list[Tensor]:
        on_its_way = self._arriving.held if self._arriving else []
        return [*(late.total for late in self._late), *on_its_way]

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._land()
        super().more(batch, next_batch)

    def after_backward(self, call: int, last: bool) -> None:
        """Nothing leaves before the last step is over, and it is known which rows go first."""

    @torch.no_grad()
    def finish(self) -> None:
        self._land()
        if self._next is None or not (self._holds_back and self._has_stepped):
            super().finish()
            return
        asked, self._coming = self._known(), self._coming_rows()
        first: list[Tensor] = [one.found.unique() for one in self._coming]  # type: ignore[no-untyped-call]
        told = [torch.isin(one.found, own) for one, own in zip(asked, first, strict=True)]
        owned, counts = [one.owned for one in asked], [one.counts for one in asked]
        answers = self._exchange([x.to(torch.uint8) for x in told], counts, owned, "gradients")
        halves = [
            (_some(one, answer.bool(), own), _some(one, ~answer.bool(), ~own))
            for one, answer, own in zip(asked, answers, told, strict=True)
        ]
        now, later = [half[0] for half in halves], [half[1] for half in halves]
        values = self._exchange(
            self._gradients(now), [one.owned for one in now], [one.counts for one in now],
            "gradients",
        )  # fmt: skip
        self._arriving = self._begin(
            self._gradients(later), [one.owned for one in later], [one.counts for one in later],
            "gradients", waits=False,
        )  # fmt: skip
        self._late = [
            _Unstepped(table.sums(one, came), own, rest)
            for table, one, came, own, rest in zip(
                self._tables, now, values, first, later, strict=True
            )
        ]
        for table in self._tables:
            table.slot.whole.grad = table.shard.grad = None

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._has_stepped = True
        if not self._late:
            super().updated(later)
            return
        step = later()
        for table, late in zip(self._tables, self._late, strict=True):
            if table.shard.numel():
                own = late.first - table.start
                late.others = step.in_parts(table.shard, own, late.total[own])
        self._answer(self._coming)
        assert self._next is not None
        self._fresh, self._asked, self._coming = self._next, self._coming, []
        self._stale = self._announced = True

    @torch.no_grad()
    def _land(self) -> None:
        """All rows take the last step."""
        if self._arriving is None:
            return
        values = self._arriving.taken()
        for table, late, came in zip(self._tables, self._late, values, strict=True):
            table.add(late.total, late.asked, came)
            if late.others is not None:
                late.others(late.total)
        self._late, self._arriving = [], None

    def settle(self) -> None:
        self._land()
        super().settle()


def _some(asked: AskedRows, own: Tensor, found: Tensor) -> AskedRows:
    """Some of the rows of this rank, and some of those that others have of its own."""
    parts = torch.split(own, asked.owned), torch.split(found, asked.counts)
    owned, counts = ([int(part.sum()) for part in of] for of in parts)
    return AskedRows(asked.rows[own], owned, asked.found[found], counts)
