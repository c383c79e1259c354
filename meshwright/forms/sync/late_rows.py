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
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Event, Exchange, Hold, Rewrite, Send
from meshwright.forms.owned import OwnedRows, check_whole
from meshwright.forms.running import LaterStep, Lines, ParameterStore, Samples, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text, wrong_settings
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
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
            # Rows are looked for in the whole gradient.
            Rewrite(what="gradients", unit="bucket", at=Event.UPDATED, moved=1.0),
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
            "first": each * (prior + (_ID_BYTES + _ANSWER_BYTES) / row),
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
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    check_whole("late_rows", slots)
    return _LateRows(slots, lines, told.word("ids"))


@dataclass(eq=False)
class _Unstepped:
    """Rows of a table whose step is not over."""

    total: Tensor
    """Gradients of a rank's own rows, as far as they have come."""
    first: Tensor
    """Rows that go first, of all; ascending."""
    asked: tuple[Tensor, list[int]]
    """Rows that each rank asks for, rank after rank, and how many."""
    rows: tuple[Tensor, list[int]]
    """The same of the rows whose gradients are on their way."""
    values: Tensor
    work: Waitable
    sent: Tensor
    """What is on its way, until it has arrived."""
    others: Callable[[Tensor], None] | None = None
    """Steps all rows but the first."""


class _LateRows(OwnedRows):
    whole_updates = False

    def __init__(self, slots: Sequence[Slot], lines: Lines, ids: str) -> None:
        super().__init__(slots, lines, ids)
        self._late: dict[int, _Unstepped] = {}
        """By table."""
        # Sums over model axes, too, are made of whole gradients, before the step.
        self._holds_back = not any(slot.param.sum_over for slot in self._slots)
        self._has_stepped = False
        """Optimizers make their state in the first step."""

    def hold_nothing_back(self) -> None:
        self._holds_back = False

    @property
    def is_settled(self) -> bool:
        return super().is_settled and not self._late

    @property
    def kept(self) -> list[Tensor]:
        return [x for late in self._late.values() for x in (late.total, late.values, late.sent)]

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._land()
        super().more(batch, next_batch)

    def finish(self) -> None:
        self._land()
        if self._next is None or not (self._holds_back and self._has_stepped):
            super().finish()
            return
        for index, slot in enumerate(self._slots):
            self._late[index] = self._split(index, self._next)
            slot.whole.grad = self._shards[index].grad = None

    def _split(self, index: int, coming: Tensor) -> _Unstepped:
        """Sums the rows that any rank reads next, and lets the others go."""
        asked = self._numbers(index, coming, "parameters")
        first: Tensor = asked[0].unique()  # type: ignore[no-untyped-call]
        gradient, rows = self._gradient(index)
        sent = self._counts(index, rows)
        found, counts = self._numbers(index, rows, "gradients")
        is_first = torch.isin(found, first)
        answers = self._exchange(is_first.to(torch.uint8), counts, sent, "gradients").bool()
        total = self._zeros(index)
        now, now_counts = _some(found, counts, is_first)
        values = self._exchange(
            gradient[rows[answers]], self._counts(index, rows[answers]), now_counts, "gradients"
        )
        self._add(index, total, now, now_counts, values)
        late, later = _some(found, counts, ~is_first), rows[~answers]
        going = gradient[later]
        arriving, work = self._start(going, self._counts(index, later), late[1])
        return _Unstepped(total, first, asked, late, arriving, work, going)

    def _start(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Waitable]:
        """Rows of `x` to each rank in turn; those that will have come."""
        peers = self._lines.shards
        found = x.new_empty((sum(received), *x.shape[1:]))
        what = What("gradients", self._lines.stage, peers.axis, "all_to_all", x.nbytes, peers.size)
        start = self._lines.recorder.mark()
        work = dist.all_to_all_single(
            found, x.contiguous(), list(received), list(sent), group=peers.group, async_op=True
        )
        assert work is not None
        return found, self._lines.recorder.pending(what, work, start)

    def updated(self, later: Callable[[], LaterStep]) -> None:
        self._has_stepped = True
        if not self._late:
            super().updated(later)
            return
        update, coming = later(), self._next
        assert coming is not None
        for index, late in self._late.items():
            shard = self._shards[index]
            if shard.numel():
                own = late.first - self._range(self._slots[index])[0]
                late.others = update.in_parts(shard, own, late.total[own])
            self._answer(index, coming, *late.asked)
        self._stale = self._announced = True
        self._fresh = coming

    def _land(self) -> None:
        """All rows have taken the last step."""
        for index, late in self._late.items():
            late.work.wait()
            self._add(index, late.total, *late.rows, late.values)
            if late.others is not None:
                late.others(late.total)
        self._late.clear()

    def settle(self) -> None:
        self._land()
        super().settle()


def _some(rows: Tensor, counts: Sequence[int], which: Tensor) -> tuple[Tensor, list[int]]:
    """Some of the rows that came, and how many from each rank."""
    parts = torch.split(which, list(counts))
    return rows[which], [int(part.sum()) for part in parts]
