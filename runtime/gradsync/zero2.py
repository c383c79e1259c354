"""ZeRO-2: as ZeRO-1, and gradients are scattered after each block's backward of a micro-batch."""

from collections.abc import Sequence

from meshwright.runtime.gradsync.base import GradientSync, Lines, Slot
from meshwright.runtime.gradsync.zero1 import Zero1


def build(slots: Sequence[Slot], lines: Lines) -> GradientSync:
    return _Zero2(slots, lines)


class _Zero2(Zero1):
    def after_backward(self, call: int, last: bool) -> None:
        for index, bucket in enumerate(self._buckets):
            if bucket.owner == call:
                self._start(index)

    def finish(self) -> None:
        self._deliver_all()
