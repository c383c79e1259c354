"""EmbRace: rows that occur go to their owners, and rows that the next batch reads come back (Li et
al. 2022).

Each rank of dp_shard owns some rows of a table: it sums their gradients, holds the state of their
optimizer and steps them. A rank sends the rows of which it has a gradient to their owners, and asks
them for the rows that its next batch reads; of all others it has old values, which nobody looks at.
Whoever reads a table otherwise waits for all of it. As owners step all that they own, every
optimizer that steps each element alone is exact.

The rows that a batch reads are those in one of the model's inputs, `ids`. Where the next batch is
not known, they are asked for when it has come.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.exchange import Event, Exchange, Hold, Rewrite, Send
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
    """Returns what is held and sent: rows and their numbers, both ways."""
    told = FormSettings(_SETTINGS, settings)
    each = told.number("rows_each") * (1 + _ID_BYTES / told.whole("row_bytes"))
    way = {"primitive": Primitive.ALL_TO_ALL, "axis": "dp_shard", "unit": "bucket",
           "share": "rows", "by_rank": True}  # fmt: skip
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="gradients", since=Event.END, until=Event.NEXT_BEGIN, part=1),
            # Rows are looked for in the whole gradient.
            Rewrite(what="gradients", unit="bucket", at=Event.UPDATED, moved=1.0),
            Send(what="gradients", at=Event.END, until=Event.END, **way),  # type: ignore[arg-type]
            Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp_replicate",
                 unit="bucket", at=Event.END, until=Event.END, of_part=True),
            Send(what="parameters", at=Event.UPDATED, until=Event.UPDATED, **way),  # type: ignore[arg-type]
        ),
        stated={"rows": each},
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
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    for slot in slots:
        if slot.whole.ndim < 2 or slot.whole.shape[0] != slot.param.global_shape[0]:
            raise PlanError(str(torn_rows("owned_rows", slot.param.fqn)))
    return _Owned(slots, lines, told.word("ids"))


class _Owned(SyncRun):
    reads_batches = True

    def __init__(self, slots: Sequence[Slot], lines: Lines, ids: str) -> None:
        self._lines, self._slots, self._ids = lines, trainable(slots), ids
        self._peers = lines.shards
        self._chunks = [-(-slot.rows // self._peers.size) for slot in self._slots]
        self._shards = [nn.Parameter(self._own(slot)) for slot in self._slots]
        owned = [
            Held(
                slot.param,
                lines.stage,
                shard,
                self._range(slot),
                lines.is_primary(slot.param, "dp_replicate"),
            )
            for slot, shard in zip(self._slots, self._shards, strict=True)
        ]
        self.held = (*owned, *held_whole(frozen(slots), lines))
        self._stale = False
        """Only what `_fresh` names is as its owners have it."""
        self._fresh = torch.empty(0, dtype=torch.int64)
        self._next: Tensor | None = None
        """Rows that the next batch reads, if that is known."""
        self._announced = False
        """They have come after the last step."""

    def _range(self, slot: Slot) -> tuple[int, int]:
        return chunk_rows(slot.rows, self._peers.size, self._peers.coordinate)

    def _own(self, slot: Slot) -> Tensor:
        start, stop = self._range(slot)
        return slot.whole.detach()[start:stop]

    @property
    def is_settled(self) -> bool:
        return not self._stale

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for slot, shard in zip(self._slots, self._shards, strict=True):
            slot.whole.grad = shard.grad = None
        self._take(batch, next_batch, announced=self._announced)
        self._announced = False

    def more(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        self._take(batch, next_batch, announced=False)

    def _take(self, batch: Samples | None, next_batch: Samples | None, *, announced: bool) -> None:
        """The rows of a batch are here, or come now; all ranks ask for theirs at once."""
        if batch is None:  # gradients are cleared, and nothing runs
            return
        rows = self._read(batch)
        if self._stale and not announced:
            self._fetch(rows)
        elif self._stale and not torch.isin(rows, self._fresh).all():
            raise PlanError(
                "this batch is not the one that next_batch said would come: its rows of "
                f"{self._slots[0].param.fqn} are not here; pass the batches in that order, or no "
                "next_batch"
            )
        self._next = None if next_batch is None else self._read(next_batch)

    def _read(self, batch: Samples) -> Tensor:
        """Rows that a batch of this rank reads, ascending."""
        if self._ids not in batch:
            given = ", ".join(batch)
            raise PlanError(f"owned_rows reads rows from input {self._ids!r}; given are {given}")
        ids = batch[self._ids].detach().to(self._slots[0].whole.device)
        found: Tensor = ids.unique()  # type: ignore[no-untyped-call]
        return found

    def finish(self) -> None:
        for index, slot in enumerate(self._slots):
            gradient = slot.whole.grad
            if gradient is None:
                gradient = torch.zeros_like(slot.whole, requires_grad=False)
            marks = gradient.reshape(slot.rows, -1).ne(0).any(dim=1)
            rows = marks.nonzero().flatten()
            found, counts = self._numbers(index, rows, "gradients")
            values = self._exchange(gradient[rows], self._counts(index, rows), counts, "gradients")
            start, stop = self._range(slot)
            total = gradient.new_zeros((stop - start, *gradient.shape[1:]))
            # Source by source in the order of ranks: two runs are equal.
            sources = zip(torch.split(found, counts), torch.split(values, counts), strict=True)
            for numbers, own in sources:
                total.index_add_(0, numbers - start, own)
            sum_over_copies(total, self._lines)
            slot.whole.grad, self._shards[index].grad = None, total

    def updated(self, later: Callable[[], Update]) -> None:
        self._stale, self._announced = True, self._next is not None
        if self._next is not None:
            self._fetch(self._next)

    def written(self) -> None:
        self._stale = True
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        if not self._stale:
            return
        for index, slot in enumerate(self._slots):
            self._fill(index, torch.arange(slot.rows, device=slot.whole.device))
        self._stale = False

    def _fetch(self, rows: Tensor) -> None:
        """These rows become as their owners have them."""
        for index in range(len(self._slots)):
            self._fill(index, rows)
        self._fresh = rows

    @torch.no_grad()
    def _fill(self, index: int, rows: Tensor) -> None:
        slot = self._slots[index]
        asked, counts = self._numbers(index, rows, "parameters")
        whole = slot.whole.detach()
        values = self._exchange(whole[asked], counts, self._counts(index, rows), "parameters")
        whole.index_copy_(0, rows, values)

    def _counts(self, index: int, rows: Tensor) -> list[int]:
        """How many of some rows, ascending, each rank owns."""
        owners = rows // self._chunks[index]
        found: list[int] = torch.bincount(owners, minlength=self._peers.size).tolist()
        return found

    def _numbers(self, index: int, rows: Tensor, purpose: Purpose) -> tuple[Tensor, list[int]]:
        """Tells owners numbers of their rows; the numbers that came, rank after rank, and how many
        from each."""
        sent = self._counts(index, rows)
        mine = torch.tensor(sent, device=rows.device)
        ones = [1] * self._peers.size
        counts: list[int] = self._exchange(mine, ones, ones, purpose).tolist()
        return self._exchange(rows, sent, counts, purpose), counts

    def _exchange(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int], purpose: Purpose
    ) -> Tensor:
        """Rows of `x` to each rank in turn; those that came."""
        peers = self._peers
        found = x.new_empty((sum(received), *x.shape[1:]))
        if peers.group is None:
            return found.copy_(x)
        what = What(purpose, self._lines.stage, peers.axis, "all_to_all", x.nbytes, peers.size)
        with self._lines.recorder.collective(what):
            dist.all_to_all_single(
                found, x.contiguous(), list(received), list(sent), group=peers.group
            )
        return found
