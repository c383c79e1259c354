"""Repeated measurements as a median, a spread and a mean."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.ir.profile.profile import Timing


def timing(seconds: Sequence[float]) -> Timing:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(
        median_s=middle,
        spread=(high - low) / 2 / middle,
        count=len(ordered),
        mean_s=sum(ordered) / len(ordered),
    )


_LEAST_S = 1e-9
"""Less than any clock's tick."""


def summarised(seconds: list[float]) -> Timing:
    """Median and spread; a clock's tick at least."""
    return timing([max(s, _LEAST_S) for s in seconds])


def averaged(seconds: Sequence[float]) -> Timing:
    """Of differences: single ones may be less than nothing. The mean is that of the middle half:
    what disturbed a few must not count."""
    ordered = sorted(seconds)
    out = len(ordered) // 4
    middle = ordered[out : len(ordered) - out]
    found = summarised(ordered)
    return replace(found, mean_s=max(_LEAST_S, sum(middle) / len(middle)))


def mean(timings: Sequence[Timing]) -> Timing:
    """Of processes that measured at once; how far they are apart counts as spread."""
    middle = sum(t.median_s for t in timings) / len(timings)
    apart = max(abs(t.median_s - middle) for t in timings) / middle if middle else 0.0
    spread = max(apart, *(t.spread for t in timings))
    return Timing(median_s=middle, spread=spread, count=sum(t.count for t in timings))
