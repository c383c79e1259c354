"""Plain data parallel: parameters and optimizer whole everywhere, gradients all-reduced."""

from collections.abc import Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.gradsync.base import BUCKET_BYTES, GradientSync, Held, Lines, Slot, buckets
from meshwright.runtime.record import Pending, What


def build(slots: Sequence[Slot], lines: Lines) -> GradientSync:
    return _Zero0(slots, lines)


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


class _Zero0:
    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        trainable = [slot for slot in slots if slot.param.requires_grad]
        self._lines = lines
        self._trainable = trainable
        self._buckets = [_Bucket(b) for b in buckets(trainable, BUCKET_BYTES)] if lines.dp else []
        self._works: dict[_Bucket, Pending] = {}
        self.held = tuple(
            Held(s.param, lines.stage, s.whole, None, lines.is_primary(s.param, sharded=False))
            for s in slots
        )

    def begin(self) -> None:
        for slot in self._trainable:
            slot.whole.grad = None
        for bucket in self._buckets:
            bucket.begin()

    def open(self, call: int, ahead: Sequence[int]) -> None:
        pass

    def close(self, call: int) -> None:
        pass

    def after_backward(self, call: int, last: bool) -> None:
        """Starts to reduce what is complete while backward goes on."""
        for bucket in self._buckets:
            if last and bucket.owner == call:
                self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        group, recorder = self._lines.dp, self._lines.recorder
        assert group is not None
        nbytes = bucket.flat.nbytes
        what = What("gradients", self._lines.stage, "dp", "all_reduce", nbytes, group.size())
        start = recorder.mark()
        work = dist.all_reduce(bucket.flat, group=group, async_op=True)
        assert work is not None
        self._works[bucket] = recorder.pending(what, work, start)

    def finish(self) -> None:
        for bucket in self._buckets:
            if bucket not in self._works:
                self._start(bucket)
        for work in self._works.values():
            work.wait()
        self._works.clear()

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        return []  # Nobody gathers parameters.

    def publish(self) -> None:
        pass
