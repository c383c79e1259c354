"""Parameters in flat buckets, of which each rank has its rows; and gradients that are summed so."""

from collections.abc import Sequence, Set
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.arriving import ArrivingSums
from meshwright.forms.running import Held, Lines, Peers, Samples, Slot, SyncRun
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.profile.measured import Purpose
from meshwright.ir.torch_private import reduce_scatter, start_all_gather

BUCKET_BYTES = 25 * 2**20
"""DDP's default: large enough to use the bandwidth, small enough to overlap with backward."""


def chunk_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First row and one past the last of part `index`: equal chunks, the last ones shorter."""
    chunk = -(-rows // parts)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


def buckets(slots: Sequence[Slot], limit_bytes: int) -> list[list[Slot]]:
    """Consecutive slots of one dtype, in the order in which backward completes them.

    A bucket is closed when it has `limit_bytes`; with 0, each owner has its own.
    """
    found: list[list[Slot]] = []
    for slot in sorted(slots, key=lambda slot: -slot.owner):
        last = found[-1] if found else []
        joins = last and last[-1].whole.dtype == slot.whole.dtype and (
            last[-1].owner == slot.owner or sum(s.stepped_bytes for s in last) < limit_bytes
        )  # fmt: skip
        if joins:
            last.append(slot)
        else:
            found.append([slot])
    return found


def sum_over_copies(flat: Tensor, lines: Lines) -> None:
    """A flat shard becomes the sum over dp_replicate."""
    peers = lines.copies
    if peers.group is not None:
        what = What("gradients", lines.stage, peers.axis, "all_reduce", flat.nbytes, peers.size)
        with lines.recorder.collective(what):
            dist.all_reduce(flat, group=peers.group)


class ShardedBucket:
    """Slots that are cut in rows over peers and move together: flat, rank by rank, padded."""

    def __init__(self, slots: Sequence[Slot], lines: Lines, peers: Peers) -> None:
        self.slots, self._lines, self.peers = tuple(slots), lines, peers
        self.owner = min(slot.owner for slot in slots)
        self.calls = frozenset(call for slot in slots for call in slot.calls)
        """All that read a parameter of it."""
        self._row = [slot.whole.numel() // max(slot.rows, 1) for slot in slots]
        self._chunk = [
            -(-slot.rows // peers.size) * row for slot, row in zip(slots, self._row, strict=True)
        ]
        self.size = sum(self._chunk)
        """Elements of one rank's flat shard."""
        own = [
            (stop - start) * row
            for (start, stop), row in zip(map(self.rows, slots), self._row, strict=True)
        ]
        sizes = [slot.whole.numel() for slot in slots]
        first = slots[0]
        like = torch.empty(0, dtype=first.summed, device=first.whole.device)
        self._packing = lines.packing(sizes, own, self._chunk, peers.size, like)
        """Of gradients' sums."""
        self._read = self._packing
        """Of what blocks read."""
        if first.is_copy:
            self._read = lines.packing(sizes, own, self._chunk, peers.size, first.whole)

    def rows(self, slot: Slot) -> tuple[int, int]:
        return chunk_rows(slot.rows, self.peers.size, self.peers.coordinate)

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Whole tensors, one per slot, as all ranks' flat shards of sums; None is zero."""
        return self._packing.pack(tensors)

    def own(self, packed: Tensor) -> Tensor:
        """This rank's flat shard of what `pack` returned."""
        return packed[self.peers.coordinate]

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Writes all ranks' flat shards to whole tensors, one per slot."""
        self._read.unpack(flat, tensors)

    def views(self, flat_shard: Tensor) -> list[Tensor]:
        """This rank's rows of each slot, in its flat shard."""
        found = []
        parts = torch.split(flat_shard.reshape(-1), self._chunk)
        for slot, row, part in zip(self.slots, self._row, parts, strict=True):
            start, stop = self.rows(slot)
            shape = (stop - start, *slot.whole.shape[1:]) if slot.whole.ndim else (stop - start,)
            found.append(part[: (stop - start) * row].view(shape))
        return found

    def pack_shards(self, shards: Sequence[Tensor]) -> Tensor:
        """This rank's rows of what is stepped, one tensor per slot, as the flat shard of what
        blocks read."""
        return self._read.pack_own(shards)

    def as_read(self, flat: Tensor) -> Tensor:
        """A flat tensor of what is stepped in the dtype that blocks read."""
        return flat.to(self.slots[0].whole.dtype)

    def gather(
        self, flat_shard: Tensor, purpose: Purpose = "parameters"
    ) -> tuple[Tensor, Waitable]:
        """Starts to fetch all ranks' flat shards."""
        flat = flat_shard.new_empty((self.peers.size, self.size))
        what = self._what(purpose, "all_gather", flat.nbytes)
        start = self._lines.recorder.mark()
        work = start_all_gather(flat.view(-1), flat_shard.view(-1), self.peers.group)
        return flat, self._lines.recorder.pending(what, work, start)

    def scatter(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Waitable]:
        """Starts the sum of whole gradients over the peers; this rank's flat shard comes out."""
        flat = self.pack(gradients)
        mine = flat.new_empty(self.size)
        what = self._what("gradients", "reduce_scatter", flat.nbytes)
        start = self._lines.recorder.mark()
        work = reduce_scatter(mine, flat.view(-1), self.peers.group)
        return mine, self._lines.recorder.pending(what, work, start)

    def _what(self, purpose: Purpose, primitive: str, nbytes: int) -> What:
        peers = self.peers
        return What(purpose, self._lines.stage, peers.axis, primitive, nbytes, peers.size)


class MakeBucket(Protocol):
    """Makes a bucket, which says who has which rows of its slots."""

    def __call__(self, slots: Sequence[Slot], lines: Lines, peers: Peers) -> ShardedBucket:
        """`peers`: among whom they are cut."""


class ShardedGradients(SyncRun):
    """Gradients whole until the last backward that adds to a bucket; then each rank gets the sum of
    its rows, while the backward goes on."""

    def __init__(
        self,
        groups: Sequence[Sequence[Slot]],
        lines: Lines,
        peers: Peers,
        make: MakeBucket = ShardedBucket,
    ) -> None:
        self._lines, self._peers, self._make = lines, peers, make
        self._buckets = [make(group, lines, peers) for group in groups]
        self._shards = [_shards(bucket) for bucket in self._buckets]
        self._arriving = ArrivingSums[int]()
        """Of buckets' gradients: this rank's part."""
        self._copies: dict[int, list[Slot]] = {}
        """Parameters that blocks read copies of, by the call that is the last to add gradients."""
        for slot in (slot for group in groups for slot in group if slot.is_copy):
            self._copies.setdefault(slot.owner, []).append(slot)
        self._added: dict[Slot, Tensor] = {}
        """Whole gradients of earlier micro-batches, of parameters of which blocks read copies."""
        self._told: set[int] = set()
        """Buckets whose gradients were handed out in this step before all had come."""
        self._opened = 0

    def held_rows(self, *copies: str) -> tuple[Held, ...]:
        """This rank's rows of all slots, of which there are copies along some axes."""
        lines = self._lines
        return tuple(
            Held(s.param, lines.stage, x, b.rows(s), lines.is_primary(s.param, *copies))
            for b, shards in zip(self._buckets, self._shards, strict=True)
            for s, x in zip(b.slots, shards, strict=True)
        )

    def cut(self, groups: Sequence[Sequence[Slot]]) -> None:
        """Puts the same slots into other buckets, between steps. A rank has the rows of a slot that
        it had, in the same tensors, as slots are cut one by one."""
        pairs = zip(self._buckets, self._shards, strict=True)
        known = {id(s): x for b, shards in pairs for s, x in zip(b.slots, shards, strict=True)}
        self._buckets = [self._make(group, self._lines, self._peers) for group in groups]
        self._shards = [[known[id(slot)] for slot in bucket.slots] for bucket in self._buckets]

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for bucket, shards in zip(self._buckets, self._shards, strict=True):
            for slot, shard in zip(bucket.slots, shards, strict=True):
                slot.whole.grad = shard.grad = None
        self._arriving.clear()
        self._added.clear()
        self._told.clear()

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        if call > self._opened:
            # What the backward before this forward left has had the time of a block.
            self._arriving.collect(keep=0)
        self._opened = call

    before_backward = before_forward

    def after_backward(self, call: int, last: bool) -> None:
        self._add(call, last)
        for index, bucket in enumerate(self._buckets):
            if last and bucket.owner == call:
                self._start(index)

    def _add(self, call: int, last: bool) -> None:
        """Gradients of copies that several micro-batches make are added up as they are summed."""
        for slot in self._copies.get(call, ()):
            if slot.whole.grad is not None and (not last or slot in self._added):
                total = self._gradient(slot)
                assert total is not None
                self._added[slot], slot.whole.grad = total.to(slot.summed), None

    def _start(self, index: int) -> None:
        self._arriving.collect(keep=1)
        bucket = self._buckets[index]
        flat, work = bucket.scatter([self._gradient(slot) for slot in bucket.slots])
        self._arriving.send(index, flat, work)
        for slot in bucket.slots:
            slot.whole.grad = None

    def _gradient(self, slot: Slot) -> Tensor | None:
        """That of all micro-batches so far, taken from where it is."""
        before, own = self._added.pop(slot, None), slot.whole.grad
        if before is None or own is None:
            return own if before is None else before
        return before.add_(own)

    def finish(self) -> None:
        for index in range(len(self._buckets)):
            if index not in self._told and index not in self._arriving:
                self._start(index)
        self._deliver_all()

    def _deliver_all(self) -> None:
        self._arriving.collect(keep=0)
        for index, flat in self._arriving.take():
            self._deliver(index, flat)

    def _deliver(self, index: int, flat: Tensor) -> None:
        """The summed flat shard becomes the shards' gradients."""
        views = self._buckets[index].views(flat)
        for shard, view in zip(self._shards[index], views, strict=True):
            shard.grad = view.to(shard.dtype)


class ShardedOptimizer(ShardedGradients):
    """The optimizer steps this rank's rows, which all ranks gather when it has."""

    def __init__(
        self,
        slots: Sequence[Slot],
        groups: Sequence[Sequence[Slot]],
        lines: Lines,
        make: MakeBucket = ShardedBucket,
    ) -> None:
        super().__init__(groups, lines, lines.shards, make)
        self._over: set[int] = set()
        """Buckets whose parameters the optimizer writes over their gradients."""
        self._summed: dict[int, Tensor] = {}
        """Their flat shards: gradients, and once the optimizer has stepped parameters."""
        self.held = (*self.held_rows("dp_replicate"), *held_whole(frozen(slots), lines))

    def arrived(self) -> Sequence[Tensor]:
        """Buckets go once in a step; those that copies of a shard sum too are whole at its end."""
        if self._lines.copies.size > 1:
            return ()
        found = []
        for index, flat in self._arriving.take():
            found.append(index)
            self._deliver(index, flat)
        self._told.update(found)
        return [shard for index in found for shard in self._shards[index]]

    def _deliver(self, index: int, flat: Tensor) -> None:
        sum_over_copies(flat, self._lines)
        super()._deliver(index, flat)
        if index in self._over:
            self._summed[index] = flat

    def cut(self, groups: Sequence[Sequence[Slot]]) -> None:
        super().cut(groups)
        self._over.clear()  # numbers of the buckets before; the job asks again

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        """Of buckets all of whose tensors are stepped, in the dtype of their gradients' sums."""
        self._over = {
            index for index, shards in enumerate(self._shards)
            if all(id(shard) in stepped for shard in shards if shard.numel())
            and all(s.summed is s.stepped for s in self._buckets[index].slots)
        }  # fmt: skip
        return [shard for index in self._over for shard in self._shards[index]]

    def skipped(self) -> None:
        self._summed.clear()

    def written(self) -> None:
        """Two buckets are under way at once: one is packed and sent while the one before it arrives
        and is unpacked."""
        under_way: list[tuple[int, Tensor, Waitable]] = []
        for index in range(len(self._buckets)):
            under_way.append((index, *self._gather(index)))
            if len(under_way) > 1:
                self._land(*under_way.pop(0))
        for one in under_way:
            self._land(*one)

    def _gather(self, index: int) -> tuple[Tensor, Waitable]:
        """Starts to gather a bucket's parameters."""
        bucket, shards = self._buckets[index], self._shards[index]
        if index in self._summed:
            flat = self._summed.pop(index)
            for shard in shards:
                shard.grad = None
            flat = bucket.as_read(flat)
        else:
            flat = bucket.pack_shards([shard.detach() for shard in shards])
        return bucket.gather(flat)

    def _land(self, index: int, whole: Tensor, work: Waitable) -> None:
        """Waits for a bucket's parameters, which blocks then read."""
        work.wait()
        bucket = self._buckets[index]
        bucket.unpack(whole, [slot.whole.detach() for slot in bucket.slots])


def _shards(bucket: ShardedBucket) -> list[nn.Parameter]:
    """This rank's rows of the whole parameters: what is written to them is there too, unless blocks
    read copies."""
    found = []
    for slot in bucket.slots:
        start, stop = bucket.rows(slot)
        whole = slot.whole.detach()
        rows = (whole if whole.ndim else whole.view(1))[start:stop]
        found.append(nn.Parameter(rows.to(slot.stepped, copy=slot.is_copy)))
    return found


def trainable(slots: Sequence[Slot]) -> list[Slot]:
    """Those that get gradients."""
    return [slot for slot in slots if slot.param.requires_grad]


def frozen(slots: Sequence[Slot]) -> list[Slot]:
    """Those that get none."""
    return [slot for slot in slots if not slot.param.requires_grad]


def held_whole(slots: Sequence[Slot], lines: Lines) -> tuple[Held, ...]:
    """Slots that every replica holds whole."""
    return tuple(
        Held(s.param, lines.stage, s.whole, None, lines.is_primary(s.param, "dp")) for s in slots
    )
