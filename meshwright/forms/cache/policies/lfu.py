"""Who has been looked up least often since it came leaves first; among equals, who has not been for
longest."""

import numpy as np
import numpy.typing as npt

from meshwright.forms.cache.policies import Floats, Ints
from meshwright.forms.cache.policies.lru import LastUse

_TIME_BITS = 40


class UsesHere:
    """How often each slot's row has been looked up since it came."""

    def __init__(self, slots: int) -> None:
        self._last = LastUse(slots)
        self._uses = np.zeros(slots, dtype=np.int64)

    def used(self, rows: Ints, at: Ints, times: Ints) -> None:
        """Counts them."""
        self._uses[at] += times
        self._last.used(rows, at, times)

    def placed(self, rows: Ints, at: Ints) -> None:
        """What was counted of the rows before is forgotten."""
        self._uses[at] = 0
        self._last.placed(rows, at)

    def worth(self, rows: Ints, at: Ints) -> npt.NDArray[np.int64]:
        """By count, then by time."""
        # 2**23 look-ups of a row are as many as 2**40 ones of all need.
        uses = np.minimum(self._uses[at], (1 << 63 - _TIME_BITS) - 1)
        return (uses << _TIME_BITS) + self._last.worth(rows, at)

    def cleared(self) -> None:
        """Nothing was counted of what comes."""
        self._uses[:] = 0

    def grown(self, slots: int) -> None:
        """More slots."""
        self._uses = np.concatenate([self._uses, np.zeros(slots - len(self._uses), np.int64)])
        self._last.grown(slots)


def make(rows: int, slots: int, counts: Floats | None) -> UsesHere:
    """Returns the policy; counts are of no use to it."""
    return UsesHere(slots)
