"""Ids as tables of recommenders get them: few occur often, and which do may change."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def zipf_batches(
    rows: int, exponent: float, batches: int, batch: int, seed: int
) -> tuple[list[Ints], Floats]:
    """Returns batches of ids that are drawn alone, and how likely each row is; which rows are
    likely follows no order."""
    draw = np.random.default_rng(seed)
    likely = np.arange(1, rows + 1, dtype=float) ** -exponent
    likely /= likely.sum()
    places = draw.permutation(rows)
    until = likely.cumsum()
    found = [places[_drawn(until, draw, batch)] for _ in range(batches)]
    share = np.empty(rows)
    share[places] = likely
    return found, share


def drifting(kind: str, seed: int, rows: int, batches: int, batch: int) -> list[Ints]:
    """Returns batches of ids of which other ones occur often with time, as one of `DRIFTS` says."""
    return DRIFTS[kind](np.random.default_rng(seed), rows, batches, batch)


_Draw = np.random.Generator


def _drawn(until: Floats, draw: _Draw, batch: int) -> Ints:
    return np.minimum(np.searchsorted(until, draw.random(batch)), len(until) - 1)


def _until(rows: int) -> Floats:
    likely = np.arange(1, rows + 1, dtype=float) ** -1.05
    return np.asarray((likely / likely.sum()).cumsum())


def _slowly(draw: _Draw, rows: int, batches: int, batch: int) -> list[Ints]:
    """Every batch one row in a hundred changes places with another."""
    until, places, found = _until(rows), draw.permutation(rows), []
    for _ in range(batches):
        some = draw.choice(rows, rows // 100, replace=False)
        places[some] = places[draw.permutation(some)]
        found.append(places[_drawn(until, draw, batch)])
    return found


def _at_once(draw: _Draw, rows: int, batches: int, batch: int) -> list[Ints]:
    """Every hundred batches all rows change places."""
    until, places, found = _until(rows), draw.permutation(rows), []
    for number in range(batches):
        if number % 100 == 0:
            places = draw.permutation(rows)
        found.append(places[_drawn(until, draw, batch)])
    return found


def _moving_on(draw: _Draw, rows: int, batches: int, batch: int) -> list[Ints]:
    """Any of 1,500 rows in turn, of which 40 are new in each batch."""
    return [(number * 40 + draw.integers(0, 1500, batch)) % rows for number in range(batches)]


DRIFTS: Mapping[str, Callable[[_Draw, int, int, int], list[Ints]]] = {
    "slowly": _slowly, "all at once": _at_once, "moving on": _moving_on,
}  # fmt: skip
