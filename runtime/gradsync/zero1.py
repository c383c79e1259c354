"""ZeRO-1: the optimizer is sharded over dp_shard; gradients are whole until the step ends."""

from collections.abc import Sequence, Set

from torch import Tensor, nn

from meshwright.runtime.gradsync.base import (
    BUCKET_BYTES,
    GradientSync,
    Held,
    Lines,
    ShardedBucket,
    Slot,
    buckets,
    sum_over_replicas,
)
from meshwright.runtime.record import Pending


def build(slots: Sequence[Slot], lines: Lines) -> GradientSync:
    return Zero1(slots, lines)


class Zero1:
    """Also the base of ZeRO-2, which scatters gradients earlier."""

    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        trainable = [slot for slot in slots if slot.param.requires_grad]
        self._lines = lines
        self._trainable = trainable
        self._buckets = [ShardedBucket(b, lines) for b in buckets(trainable, BUCKET_BYTES)]
        self._shards = [self._make_shards(bucket) for bucket in self._buckets]
        self._works: list[tuple[int, Tensor, Pending]] = []
        self._sums: dict[int, Tensor] = {}
        """Buckets whose gradients have come: this rank's part."""
        self._opened = 0
        self._over: set[int] = set()
        """Buckets whose parameters the optimizer writes over their gradients."""
        self._summed: dict[int, Tensor] = {}
        """Their flat shards: gradients, and once the optimizer has stepped parameters."""
        self.held = (
            *(
                Held(s.param, lines.stage, x, b.rows(s), lines.is_primary(s.param, sharded=True))
                for b, shards in zip(self._buckets, self._shards, strict=True)
                for s, x in zip(b.slots, shards, strict=True)
            ),
            *(
                Held(s.param, lines.stage, s.whole, None, lines.is_primary(s.param, sharded=False))
                for s in slots
                if not s.param.requires_grad
            ),
        )

    def _make_shards(self, bucket: ShardedBucket) -> list[nn.Parameter]:
        """This rank's rows of the whole parameters: the optimizer updates them in place."""
        found = []
        for slot in bucket.slots:
            start, stop = bucket.rows(slot)
            whole = slot.whole.detach()
            found.append(nn.Parameter((whole if whole.ndim else whole.view(1))[start:stop]))
        return found

    def begin(self) -> None:
        for slot in self._trainable:
            slot.whole.grad = None
        for shards in self._shards:
            for shard in shards:
                shard.grad = None
        self._sums.clear()

    def open(self, call: int, ahead: Sequence[int]) -> None:
        if call > self._opened:
            # A forward: what the backward before it left has had the time of a block.
            self._collect(keep=0)
        self._opened = call

    def close(self, call: int) -> None:
        pass

    def after_backward(self, call: int, last: bool) -> None:
        for index, bucket in enumerate(self._buckets):
            if last and bucket.owner == call:
                self._start(index)

    def _start(self, index: int) -> None:
        self._collect(keep=1)
        bucket = self._buckets[index]
        flat, work = bucket.scatter([slot.whole.grad for slot in bucket.slots])
        self._works.append((index, flat, work))
        for slot in bucket.slots:
            slot.whole.grad = None

    def _collect(self, keep: int) -> None:
        """Adds up what has arrived, all but the newest `keep`, which may still be on its way."""
        while len(self._works) > keep:
            index, flat, work = self._works.pop(0)
            work.wait()
            if index in self._sums:
                self._sums[index] += flat
            else:
                self._sums[index] = flat

    def finish(self) -> None:
        started = {*self._sums, *(index for index, _, _ in self._works)}
        for index in range(len(self._buckets)):
            if index not in started:
                self._start(index)
        self._deliver_all()

    def _deliver_all(self) -> None:
        self._collect(keep=0)
        for index, flat in self._sums.items():
            self._deliver(index, flat)
        self._sums.clear()

    def _deliver(self, index: int, flat: Tensor) -> None:
        """The summed flat shard becomes the shards' gradients."""
        sum_over_replicas(flat, self._lines)
        views = self._buckets[index].views(flat)
        for shard, view in zip(self._shards[index], views, strict=True):
            shard.grad = view
        if index in self._over:
            self._summed[index] = flat

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        """Of buckets all of whose tensors are stepped."""
        self._over = {
            index for index, shards in enumerate(self._shards)
            if all(id(shard) in stepped for shard in shards if shard.numel())
        }  # fmt: skip
        return [shard for index in self._over for shard in self._shards[index]]

    def publish(self) -> None:
        for index, (bucket, shards) in enumerate(zip(self._buckets, self._shards, strict=True)):
            if index in self._summed:
                flat = self._summed.pop(index)
                for shard in shards:
                    shard.grad = None
            else:
                flat = bucket.pack_shards([shard.detach() for shard in shards])
            whole, pending = bucket.gather(flat)
            pending.wait()
            bucket.unpack(whole, [slot.whole.detach() for slot in bucket.slots])
