"""Ops that multiply what they read by a weight: linear layers and convolutions of images."""

from collections.abc import Sequence
from typing import Any

LINEAR, CONVOLUTION = "aten.linear.default", "aten.conv2d.default"


def window_of(target: str, settings: Sequence[Any]) -> tuple[tuple[int, ...], ...] | None:
    """Returns (stride, padding, dilation) of a convolution of images without groups, () of a linear
    layer, and None of any other op. `settings`: its arguments after input, weight and bias."""
    if target == LINEAR:
        return ()
    if target != CONVOLUTION:
        return None
    pairs: list[tuple[int, ...]] = [(1, 1), (0, 0), (1, 1)]
    for at, value in enumerate(settings[:3]):
        if isinstance(value, str):
            return None
        found = tuple(int(x) for x in value)
        pairs[at] = found * 2 if len(found) == 1 else found
    groups = int(settings[3]) if len(settings) > 3 else 1
    return tuple(pairs) if groups == 1 else None
