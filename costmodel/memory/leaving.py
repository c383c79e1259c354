"""Gradients that leave for the host: what of them is still on its way, by the times of a plan.

What a device must have room for takes their copies to end as late as the job lets them. Links are
often faster, and then there is less at the peak: this is about how much there will be.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Leaving(NamedTuple):
    """A block in a backward, and the copy of its gradients."""

    most_s: float
    """From its begin until it has most at once."""
    total_s: float
    copy_s: float
    """0 if it sends nothing."""


class OnTheWay(NamedTuple):
    """Shares of what has left that are still there."""

    newest: float
    """Of the last block that sent some, as a block has most."""
    before: float
    """Of the one before that."""
    at_end: float
    """Of the last but one, once the block itself has sent its own."""


LATE = OnTheWay(1.0, 1.0, 1.0)
Way = tuple[OnTheWay, ...]
"""Per block in order of the forward."""


def on_the_way(blocks: Sequence[Leaving], forward_s: float, in_flight: int) -> tuple[Way, Way]:
    """Returns what is on its way in the first backward of a step, and in one that comes after
    another and a forward. `blocks` in order of the forward; `in_flight`: copies at most."""
    now, copies = 0.0, [(0.0, 0.0)] * 2
    found: list[Way] = []
    for _ in range(2):
        rows = []
        for most_s, total_s, copy_s in reversed(blocks):
            most = [_left(copy, now + most_s) for copy in (copies[-1], copies[-2])]
            now += total_s
            if copy_s:
                now = max(now, copies[-in_flight][0])
                copies.append((max(now, copies[-1][0]) + copy_s, copy_s))
            rows.append(OnTheWay(most[0], most[1], _left(copies[-2], now)))
        found.append(tuple(reversed(rows)))
        now += forward_s
    return found[0], found[1]


def _left(copy: tuple[float, float], now: float) -> float:
    """The share of a copy (when it ends, how long it takes) that is still to be made."""
    end, takes = copy
    return min(1.0, max(0.0, end - now) / takes) if takes else 0.0
