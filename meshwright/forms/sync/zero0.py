"""Plain data parallel: parameters and optimizer whole everywhere, gradients all-reduced."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Send
from meshwright.forms.flat import BUCKET_BYTES, buckets, held_whole, trainable
from meshwright.forms.running import Lines, ParameterStore, Samples, Slot, SyncRun
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage

FOLDS = True


def describe(replicas: int) -> Exchange:
    """Buckets are flat tensors that hold the gradients all the time, cleared after each step; one
    replica alone has gradients where its backward makes them."""
    optimizer = Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1)
    if replicas == 1:
        return Exchange((
            optimizer,
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
        ))  # fmt: skip
    return Exchange((
        optimizer,
        Hold(kind="gradients", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp", unit="bucket",
             at=Event.AFTER_LAST, until=Event.END),
        Rewrite(what="gradients", unit="bucket", at=Event.UPDATED, moved=1.0),
    ))  # fmt: skip


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    return _Whole(slots, lines)


class _Bucket:
    """Gradients that live in one flat tensor, so that reducing them copies nothing."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self.owner = min(slot.owner for slot in slots)
        first = slots[0].whole
        self.flat = torch.zeros(
            sum(slot.whole.numel() for slot in slots), dtype=first.dtype, device=first.device
        )

    def begin(self) -> None:
        self.flat.zero_()
        parts = torch.split(self.flat, [slot.whole.numel() for slot in self.slots])
        for slot, part in zip(self.slots, parts, strict=True):
            slot.whole.grad = part.view(slot.whole.shape)


class _Whole(SyncRun):
    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        self._lines = lines
        self._trainable = trainable(slots)
        shared = lines.replicas.group is not None
        self._buckets = (
            [_Bucket(b) for b in buckets(self._trainable, BUCKET_BYTES)] if shared else []
        )
        self._works: dict[_Bucket, Waitable] = {}
        self._arrived: list[Tensor] = []
        self._told: set[_Bucket] = set()
        self.held = held_whole(slots, lines)

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for slot in self._trainable:
            slot.whole.grad = None
        for bucket in self._buckets:
            bucket.begin()

    def after_backward(self, call: int, last: bool) -> None:
        """Starts to reduce what is complete while backward goes on."""
        if not self._buckets and last:
            self._arrived += [slot.whole for slot in self._trainable if slot.owner == call]
        for bucket in self._buckets:
            if last and bucket.owner == call:
                self._start(bucket)

    def arrived(self) -> Sequence[Tensor]:
        """All but the newest bucket, which may still be on its way."""
        for bucket in list(self._works)[:-1]:
            if bucket not in self._told:
                self._works[bucket].wait()
                self._told.add(bucket)
                self._arrived += [slot.whole for slot in bucket.slots]
        found, self._arrived = self._arrived, []
        return found

    def _start(self, bucket: _Bucket) -> None:
        peers, recorder = self._lines.replicas, self._lines.recorder
        nbytes = bucket.flat.nbytes
        what = What("gradients", self._lines.stage, peers.axis, "all_reduce", nbytes, peers.size)
        start = recorder.mark()
        work = dist.all_reduce(bucket.flat, group=peers.group, async_op=True)
        assert work is not None
        self._works[bucket] = recorder.pending(what, work, start)

    def finish(self) -> None:
        for bucket in self._buckets:
            if bucket not in self._works:
                self._start(bucket)
        for bucket, work in self._works.items():
            if bucket not in self._told:
                work.wait()
        self._works.clear()
        self._told.clear()
        self._arrived.clear()
