"""ZeRO-2: as ZeRO-1, and gradients are scattered after each block's backward of a micro-batch."""

from collections.abc import Sequence

from meshwright.forms.sync.flat import BUCKET_BYTES, ShardedOptimizer, buckets, trainable
from meshwright.forms.sync.running import Lines, Slot, SyncRun
from meshwright.ir.plan import Stage


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> SyncRun:
    """Returns what runs the form in a stage."""
    return _ScatteredEarly(slots, buckets(trainable(slots), BUCKET_BYTES), lines)


class _ScatteredEarly(ShardedOptimizer):
    def after_backward(self, call: int, last: bool) -> None:
        for index, bucket in enumerate(self._buckets):
            if bucket.owner == call:
                self._start(index)

    def finish(self) -> None:
        self._deliver_all()
