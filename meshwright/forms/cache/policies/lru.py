"""Who has not been looked up for longest leaves first."""

import numpy as np
import numpy.typing as npt

from meshwright.forms.cache.policies import Floats, Ints


class LastUse:
    """The time of each slot's last look-up."""

    def __init__(self, slots: int) -> None:
        self._last = np.zeros(slots, dtype=np.int64)
        self._now = 0

    def used(self, rows: Ints, at: Ints, times: Ints) -> None:
        """Of a batch, rows with a larger number count as later."""
        self._last[at] = np.arange(self._now, self._now + len(at))
        self._now += len(at)

    def placed(self, rows: Ints, at: Ints) -> None:
        """As if they had been looked up."""
        self.used(rows, at, rows)

    def worth(self, rows: Ints, at: Ints) -> npt.NDArray[np.int64]:
        """The later the more."""
        return self._last[at]

    def cleared(self) -> None:
        """Nothing is to be forgotten: what comes is later."""

    def grown(self, slots: int) -> None:
        """More slots."""
        self._last = np.concatenate([self._last, np.zeros(slots - len(self._last), np.int64)])


def make(rows: int, slots: int, counts: Floats | None) -> LastUse:
    """Returns the policy; counts are of no use to it."""
    return LastUse(slots)
