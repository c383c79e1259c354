"""Fits curves of links to published timings: few switch points, least sum of log errors."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import median

from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.comm.curves import curve
from meshwright.costmodel.fit.calibrate_links import rising
from meshwright.ir.cluster.device import Curve, Link

_PER_KNOT = 0.12
"""Sum of log errors that a further switch point must save."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class CommTiming:
    """One timing: of `operation` on `nbytes` (the whole value) among `size` devices of a tier."""

    operation: str
    nbytes: float
    size: int
    seconds: float


def fit_points(timings: Sequence[tuple[float, float]]) -> Points:
    """A never-falling line through some of the timings, with a price on each point."""
    merged: dict[float, list[float]] = defaultdict(list)
    for nbytes, seconds in timings:
        merged[nbytes].append(seconds)
    found = rising([(n, median(s)) for n, s in sorted(merged.items())])
    # Shortest path over the timings: an edge costs what the straight line between its ends misses.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,))]
    for end in range(1, len(found)):
        best.append(
            min(
                (cost + _missed(found[start : end + 1]) + _PER_KNOT, (*way, end))
                for start, (cost, way) in enumerate(best)
            )
        )
    return tuple(found[i] for i in best[-1][1])


def _missed(points: Points) -> float:
    (first_n, first_s), (last_n, last_s) = points[0], points[-1]
    slope = (last_s - first_s) / (last_n - first_n)
    return sum(abs(log((first_s + (n - first_n) * slope) / s)) for n, s in points[1:-1])


def fit_curves(rows: Iterable[CommTiming]) -> tuple[Curve, ...]:
    """One curve per operation and group size."""
    timings: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        timings[row.operation, row.size].append((row.nbytes, row.seconds))
    return tuple(
        Curve(operation=operation, size=size, points=fit_points(found))
        for (operation, size), found in sorted(timings.items())
    )


def halves(rows: Iterable[CommTiming]) -> tuple[list[CommTiming], list[CommTiming]]:
    """Every other size of each operation and group, ends in the first half; and the rest."""
    ordered: dict[tuple[str, int], list[CommTiming]] = defaultdict(list)
    for row in rows:
        ordered[row.operation, row.size].append(row)
    first, second = [], []
    for held in ordered.values():
        held.sort(key=lambda row: row.nbytes)
        first += held[::2]
        second += held[1::2]
    return first, second


def errors(link: Link, rows: Iterable[CommTiming]) -> list[float]:
    """Relative error of the link's time for each row."""
    return [curve(link, row.operation, row.size)(row.nbytes) / row.seconds - 1 for row in rows]


def outer_timings(
    timings: Sequence[tuple[float, float]], inner: Level, outer: Level, operation: str
) -> list[tuple[float, float]]:
    """What the tier between nodes takes of groups over both tiers.

    Undoes how `costmodel.comm.comm` puts tiers together, for sizes that the outer tier limits. Of
    `outer` only the size and the launch count.
    """
    total = inner.size * outer.size
    all_to_all = operation == "all_to_all"
    held = 1 if all_to_all else inner.size
    share = (total - 1) / total * outer.size / (outer.size - 1)
    if all_to_all:
        share = 1 / inner.size
    near = curve(inner.link, operation, inner.size)
    common = min(near.latency_s, inner.link.launch_s, outer.link.launch_s)
    found = [(n / held, max(s - near.latency_s + common, s / 4)) for n, s in timings]
    least = min(seconds for _, seconds in found)
    return [(n, least + (s - least) / share) for n, s in found]
