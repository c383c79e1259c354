"""Ranks that own rows of a table: who has a gradient of some sends it, who reads some asks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.flat import chunk_rows, frozen, held_whole, sum_over_copies, trainable
from meshwright.forms.rows import torn_rows
from meshwright.forms.running import Held, LaterStep, Lines, Samples, Slot, SyncRun
from meshwright.ir.comm.collective import What
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.measured import Purpose


def check_whole(form: str, slots: Sequence[Slot]) -> None:
    """PlanError for a table of which model axes split rows, or that has none."""
    for slot in slots:
        if slot.whole.ndim < 2 or slot.whole.shape[0] != slot.param.global_shape[0]:
            raise PlanError(str(torn_rows(form, slot.param.fqn)))


class OwnedRows(SyncRun):
    """Tables of which each rank of dp_shard steps some rows, in turn; the rows that a batch reads
    are those in its input `ids`."""

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
            gradient, rows = self._gradient(index)
            found, counts = self._numbers(index, rows, "gradients")
            values = self._exchange(gradient[rows], self._counts(index, rows), counts, "gradients")
            total = self._zeros(index)
            self._add(index, total, found, counts, values)
            sum_over_copies(total, self._lines)
            slot.whole.grad, self._shards[index].grad = None, total

    def _gradient(self, index: int) -> tuple[Tensor, Tensor]:
        """This replica's of a table, and the rows of it that have anything, ascending."""
        slot = self._slots[index]
        gradient = slot.whole.grad
        if gradient is None:
            gradient = torch.zeros_like(slot.whole, requires_grad=False)
        return gradient, gradient.reshape(slot.rows, -1).ne(0).any(dim=1).nonzero().flatten()

    def _zeros(self, index: int) -> Tensor:
        """A gradient of this rank's own rows."""
        return torch.zeros_like(self._shards[index], requires_grad=False)

    def _add(
        self, index: int, total: Tensor, rows: Tensor, counts: list[int], values: Tensor
    ) -> None:
        """Adds what came from each rank of some rows."""
        start, _ = self._range(self._slots[index])
        # Source by source in the order of ranks: two runs are equal.
        for own, x in zip(torch.split(rows, counts), torch.split(values, counts), strict=True):
            total.index_add_(0, own - start, x)

    def updated(self, later: Callable[[], LaterStep]) -> None:
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
        self._answer(index, rows, *self._numbers(index, rows, "parameters"))

    @torch.no_grad()
    def _answer(self, index: int, rows: Tensor, asked: Tensor, counts: Sequence[int]) -> None:
        """Owners send rows that each rank asked for; this one asked for `rows`."""
        whole = self._slots[index].whole.detach()
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
