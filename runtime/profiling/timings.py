"""Repeated measurements as a median, a spread and a mean."""

from collections.abc import Sequence

from meshwright.ir.profile import Timing


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
