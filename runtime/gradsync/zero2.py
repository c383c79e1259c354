"""ZeRO-2: as ZeRO-1, and gradients are scattered after each block's backward of a micro-batch."""

from collections.abc import Sequence

from torch import Tensor

from meshwright.runtime.gradsync.base import GradientSync, Lines, Slot
from meshwright.runtime.gradsync.zero1 import Zero1


def build(slots: Sequence[Slot], lines: Lines) -> GradientSync:
    return _Zero2(slots, lines)


class _Zero2(Zero1):
    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        super().__init__(slots, lines)
        self._sums: dict[int, Tensor] = {}

    def begin(self) -> None:
        super().begin()
        self._sums.clear()

    def after_backward(self, call: int, last: bool) -> None:
        for index, bucket in enumerate(self._buckets):
            if bucket.owner == call:
                self._collect(keep=1)
                self._start(index)

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
        self._collect(keep=0)
        for index, flat in self._sums.items():
            self._deliver(index, flat)
