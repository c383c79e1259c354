"""What a cache of rows finds in its slots, by its map alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshwright.forms.cache.policies import policy
from meshwright.forms.cache.slots import Ints, SlotMap


def hit_rate(
    name: str,
    batches: Sequence[Ints],
    rows: int,
    slots: int,
    counts: npt.NDArray[np.float64] | None = None,
    warm: Ints | None = None,
) -> float:
    """Returns the share of look-ups that find their row under a policy."""
    found = SlotMap(rows, slots, policy(name, rows, slots, counts))
    if warm is not None:
        found.admit(warm, count=False)
        found.release(warm)
    for batch in batches:
        own, times = np.unique(batch, return_counts=True)
        found.admit(own, times)
        found.release(own)
    return found.counts.hit_rate()
