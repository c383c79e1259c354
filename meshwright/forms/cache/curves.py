"""What caches of several tables miss, by how many slots each has, and how they share one budget."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MissCurve:
    """Of one table: rows by how likely a step's batch reads them, the likeliest first."""

    likely: _Floats
    """Of each class of rows, descending."""
    count: _Floats
    """Rows of each class."""

    @property
    def rows(self) -> float:
        return float(self.count.sum())

    def read(self) -> float:
        """Returns how many rows a batch reads, on average."""
        return float((self.likely * self.count).sum())

    def missing(self, slots: float) -> float:
        """Returns how many rows of a batch are in no slot, on average, where the likeliest rows
        are: the least that a cache of so many slots can miss."""
        until = np.concatenate([[0.0], self.count.cumsum()])
        read = np.concatenate([[0.0], (self.likely * self.count).cumsum()])
        return max(0.0, float(read[-1] - np.interp(slots, until, read)))


def shared_out(
    curves: Mapping[str, MissCurve],
    row_bytes: Mapping[str, float],
    least: Mapping[str, float],
    budget: float,
) -> dict[str, int]:
    """Returns the slots of each table under which the fewest bytes are missing of a batch, of
    `budget` bytes in all.

    `row_bytes`: of a slot; `least`: slots that each has at least, whatever the budget. A slot more
    saves a row's bytes as often as that row is read, and takes as many: so rows get slots in the
    order of how likely they are, whichever table they are of. That is the optimum, but for a part
    of a row.
    """
    slots = {name: min(least[name], curve.rows) for name, curve in curves.items()}
    left = budget - sum(slots[name] * row_bytes[name] for name in curves)
    steps = []
    for name, curve in curves.items():
        until = curve.count.cumsum()
        for start, stop, likely in zip(until - curve.count, until, curve.likely, strict=True):
            own = stop - max(start, slots[name])
            if own > 0:
                steps.append((float(likely), name, float(own)))
    for _, name, own in sorted(steps, key=lambda step: (-step[0], step[1])):
        if left <= 0:
            break
        taken = min(own, left / row_bytes[name])
        slots[name] += taken
        left -= taken * row_bytes[name]
    return {name: max(1, int(found + 1e-9)) for name, found in slots.items()}
