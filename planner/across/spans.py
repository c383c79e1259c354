"""Sums and maxima over runs of blocks as matrices: entry [i, k] is about blocks i to k-1."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.comm.comm import Levels, bends, collective_time
from meshwright.ir.layout.conversions import Primitive

Matrix = NDArray[np.float64]
GRID: Matrix = np.concatenate([[0.0], np.geomspace(1.0, 1e13, 53)])
"""Bytes at which the times of collectives are sampled."""


def sums(values: Sequence[float]) -> Matrix:
    """Sums over runs."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    found: Matrix = total[None, :] - total[:, None]
    return found


def highest(values: Sequence[float]) -> Matrix:
    """Maxima over runs."""
    size = len(values)
    # Row i has what begins with block i: zeros before it, then the highest so far.
    each = np.triu(np.broadcast_to(np.asarray(values, dtype=float), (size, size)))
    found = np.zeros((size + 1, size + 1))
    np.maximum.accumulate(each, axis=1, out=found[:size, 1:])
    return found


def sums_of_named(values: Sequence[Mapping[str, float]]) -> Matrix:
    """Sums over runs where a name that several blocks of a run have counts once, at its largest.

    `values`: per block. Exact where a name has the same value in all blocks.
    """
    twice = np.zeros((len(values) + 1, len(values) + 1))
    """At [i, k]: what runs that begin at i or before, and end at k or behind, have twice."""
    seen: dict[str, int] = {}
    for block, held in enumerate(values):
        for name, value in held.items():
            if not value:
                continue
            if name in seen:
                earlier = seen[name]
                twice[earlier, block + 1] += min(value, values[earlier][name])
            seen[name] = block
    found = sums([sum(held.values()) for held in values])
    found -= np.cumsum(np.cumsum(twice[::-1], axis=0)[::-1], axis=1)
    return found


class Collectives:
    """`collective_time` of many sizes at once: it is piecewise linear in the bytes."""

    def __init__(self) -> None:
        self._times: dict[tuple[Primitive, Levels], tuple[Matrix, Matrix]] = {}

    def __call__(self, primitive: Primitive, nbytes: Matrix, levels: Levels) -> Matrix:
        if not levels:
            return np.zeros_like(nbytes)
        key = (primitive, levels)
        if key not in self._times:
            grid = np.union1d(GRID, bends(primitive, levels))
            times = [collective_time(primitive, float(n), levels) for n in grid]
            self._times[key] = grid, np.array(times)
        found: Matrix = np.interp(nbytes, *self._times[key])
        return found


def together(each: Iterable[Matrix]) -> Matrix:
    """Returns the sum of one matrix or more, entry by entry."""
    found: Matrix = np.sum(list(each), axis=0)
    return found
