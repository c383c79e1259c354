"""Seconds of one operation on one link as a line that bends at switch points."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2

from meshwright.ir.cluster.device import Curve, Link

_TAIL = 0.7
"""Beyond the largest point the rate is at most 1/0.7 of its mean so far: noise in the last two
points must not make large messages free."""

# An operation without a curve: which curves may stand in, and how much of their bytes it moves.
_STAND_INS = {
    "all_reduce": (("reduce_scatter", 2.0), ("all_gather", 2.0)),
    "reduce_scatter": (("all_gather", 1.0), ("all_reduce", 0.5)),
    "all_gather": (("reduce_scatter", 1.0), ("all_reduce", 0.5)),
    "broadcast": (("all_gather", 1.0), ("all_reduce", 0.5)),
    "all_to_all": (),
    "send": (),
}
_ROUNDS = {"all_reduce": 2}


@dataclass(frozen=True, slots=True)
class Bent:
    """A function of bytes: linear between knots, never falling."""

    nbytes: tuple[float, ...]
    """Knots, the first of them 0."""
    seconds: tuple[float, ...]
    slopes: tuple[float, ...]
    """From each knot on."""

    def __call__(self, nbytes: float) -> float:
        i = bisect_right(self.nbytes, nbytes) - 1
        return self.seconds[i] + (nbytes - self.nbytes[i]) * self.slopes[i]

    @property
    def latency_s(self) -> float:
        return self.seconds[0]

    def changed(self, transfer: float, latency_s: float) -> "Bent":
        """The same bends with `transfer` times the bytes' share of the time."""
        first = self.seconds[0]
        return Bent(
            self.nbytes,
            tuple(latency_s + (s - first) * transfer for s in self.seconds),
            tuple(slope * transfer for slope in self.slopes),
        )


def through(points: Sequence[tuple[float, float]]) -> Bent:
    """The line through points of (bytes, seconds), from 0 bytes on."""
    if points[0][0] > 0:
        points = [(0.0, points[0][1]), *points]
    slopes = [(t - s) / (m - n) for (n, s), (m, t) in pairwise(points)]
    last_n, last_s = points[-1]
    mean = (last_s - points[0][1]) / last_n if last_n else 0.0
    slopes.append(max(slopes[-1] if slopes else 0.0, _TAIL * mean))
    return Bent(tuple(n for n, _ in points), tuple(s for _, s in points), tuple(slopes))


@lru_cache(maxsize=4096)
def curve(link: Link, operation: str, size: int) -> Bent:
    """The operation among `size` devices that are one tier's neighbours."""
    for name, share in ((operation, 1.0), *_STAND_INS[operation]):
        known = {c.size: c for c in link.curves if c.operation == name}
        if known:
            found = _among(link, operation, known, size)
            return found.changed(share, found.latency_s) if share != 1.0 else found
    return _by_constants(link, operation, size)


def _among(link: Link, operation: str, known: dict[int, Curve], size: int) -> Bent:
    """From curves of other group sizes: between two of them, or beyond the nearest."""
    if size in known:
        return through(known[size].points)
    below = [n for n in known if n < size]
    above = [n for n in known if n > size]
    if below and above:
        low, high = max(below), min(above)
        # Latency grows with the logarithm of the size where trees are used.
        weight = log2(size / low) / log2(high / low)
        return _mixed(through(known[low].points), through(known[high].points), weight)
    nearest = max(below) if below else min(above)
    base = through(known[nearest].points)
    more = _steps(operation, size) - _steps(operation, nearest)
    latency = max(base.latency_s + more * link.step_s, min(base.latency_s, link.launch_s))
    return base.changed(_moved(operation, size) / _moved(operation, nearest), latency)


def _mixed(low: Bent, high: Bent, weight: float) -> Bent:
    knots = sorted({*low.nbytes, *high.nbytes})
    points = [(n, (1 - weight) * low(n) + weight * high(n)) for n in knots]
    return through(points)


def _moved(operation: str, size: int) -> float:
    """Share of the whole value that one device sends."""
    if operation == "all_to_all":
        return (size - 1) / size / size
    if operation in ("broadcast", "send"):
        return 1.0
    return _ROUNDS.get(operation, 1) * (size - 1) / size


def _steps(operation: str, size: int) -> int:
    """Messages one after the other of the quickest way for few bytes."""
    if operation == "all_to_all":
        return size - 1
    return _ROUNDS.get(operation, 1) * ceil(log2(size))


def _by_constants(link: Link, operation: str, size: int) -> Bent:
    """A tree while latency counts, a ring once bytes do."""
    if operation == "send":
        return through_rate(link.latency_s, 1 / link.bandwidth_bytes_per_s)
    tree_s = link.launch_s + _steps(operation, size) * link.step_s
    slope = _moved(operation, size) / link.rate
    if operation in ("broadcast", "all_to_all"):
        return through_rate(tree_s, slope)
    # The textbook ring (Patarasuk & Yuan 2009) moves (n-1)/n of the value, a tree all of it.
    rounds = _ROUNDS.get(operation, 1)
    ring_s = link.launch_s + rounds * (size - 1) * link.step_s
    steep = rounds / link.rate
    bend = (ring_s - tree_s) / (steep - slope)
    if bend <= 0:
        return through_rate(ring_s, slope)
    return Bent((0.0, bend), (tree_s, tree_s + bend * steep), (steep, slope))


def through_rate(latency_s: float, seconds_per_byte: float) -> Bent:
    return Bent((0.0,), (latency_s,), (seconds_per_byte,))
