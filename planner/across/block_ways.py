"""What the blocks of a model need under each mesh, and what weighs against what in a relaxation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.across.spans import Matrix

KNOTS = 9
"""Blocks of one kind that are looked at; others lie between."""


class BlockWays(NamedTuple):
    """What blocks need: arrays over [mesh, mode, item]; an item stands for equal blocks."""

    blocks: Matrix
    """[item]: how many blocks it stands for."""
    busy_s: Matrix
    load_s: Matrix
    """With what comes once per step, shared out over the micro-batches."""
    state_bytes: Matrix
    flight_bytes: Matrix
    room: float
    prices: tuple[float, ...]
    """Of memory, in seconds per byte."""
    input_s: Matrix
    """[mesh, mode, item]: without the weight half of backwards."""
    forward_s: Matrix
    """[mesh, item]"""
    forward_share: Matrix
    """[mesh]: the most that the forward is of any block's work."""
    copy_s: Matrix
    """[mesh, item]: moving to the host what a block holds inside; zeros where nothing is moved."""
    offload: int
    """Number of the mode in which that is done; -1 if there is none."""
    spared_s: Matrix
    """[mesh]: waits for what was moved that may be shorter, in all."""
    kept_s: Matrix
    """[mesh, item]: of `busy_s`, where nothing is made again."""

    def of(self, items: NDArray[np.int64], blocks: Matrix) -> "BlockWays":
        """With these items, which may be the same ones several times."""
        return self._replace(
            blocks=blocks,
            busy_s=self.busy_s[:, :, items],
            load_s=self.load_s[:, :, items],
            state_bytes=self.state_bytes[:, :, items],
            flight_bytes=self.flight_bytes[:, :, items],
            input_s=self.input_s[:, :, items],
            forward_s=self.forward_s[:, items],
            copy_s=self.copy_s[:, items],
            kept_s=self.kept_s[:, items],
        )


class Totals(NamedTuple):
    """Of a micro-batch in the whole model; arrays over [price, mesh], or of the best of them."""

    busy_s: Matrix
    load_s: Matrix
    input_s: Matrix
    forward_s: Matrix
    share: Matrix
    kept_s: Matrix


class Weights(NamedTuple):
    """What is weighed against computing: arrays over [price]."""

    prices: Matrix
    """Of a byte, in seconds."""
    copies: Matrix
    """Of copying against computing in a forward, as far as they must go on at the same time."""


class Knots(NamedTuple):
    """Blocks, of each kind a few: arrays over [item]."""

    kinds: NDArray[np.int64]
    values: Matrix
    counts: Matrix


def knots(kind_of: NDArray[np.int64], values: Matrix) -> Knots:
    """Some values of the blocks of each kind, and how many blocks each stands for.

    A block between two values counts for both in proportion. So sums of a concave function of the
    values come out too small if anything: chords lie below it.
    """
    kinds, found, counts = [], [], []
    for kind in range(int(kind_of.max()) + 1):
        own = np.sort(values[kind_of == kind])
        places = np.linspace(0, len(own) - 1, min(len(own), KNOTS)).round().astype(int)
        few = np.unique(own[places])
        kinds += [kind] * len(few)
        found += few.tolist()
        counts += [float(np.interp(own, few, hat).sum()) for hat in np.eye(len(few))]
    return Knots(np.array(kinds), np.array(found), np.array(counts))


def weights(ways: BlockWays, flights: Matrix) -> Weights:
    """Those that are tried. A weight of copying is best where moving a byte costs its price."""
    pairs: list[tuple[float, float]] = []
    for price in ways.prices:
        pairs.append((price, 0.0))
        if ways.offload >= 0 and price:
            saved = (ways.flight_bytes[:, 0] - ways.flight_bytes[:, ways.offload]) * flights
            used = ways.copy_s > 0
            if used.any():
                gain = float(np.median(saved[used] / ways.copy_s[used]))
                pairs.append((price, min(1.0, price * gain)))
    prices, copies = np.array(pairs).T
    return Weights(prices, copies)


def both_waits(ways: BlockWays) -> Sequence[BlockWays]:
    """The ways as they are; and with no wait for what was moved, of which then none is spared:
    the better bound where memory costs nothing."""
    if ways.offload < 0:
        return (ways,)
    busy, load = ways.busy_s.copy(), ways.load_s.copy()
    busy[:, ways.offload], load[:, ways.offload] = busy[:, 0], load[:, 0]
    spared = np.zeros_like(ways.spared_s)
    return ways, ways._replace(busy_s=busy, load_s=load, spared_s=spared, prices=(0.0,))


def weighed(ways: BlockWays, held: Matrix, memory: Matrix, weights: Weights) -> Matrix:
    """Each item's cost in its best mode, over [price, mesh, item].

    The forward of a stage is as long as its computing and as its copies but for the last two: so it
    is as long as any mean of both.
    """
    found = held + weights.prices[:, None, None, None] * memory
    if weights.copies.any():
        copies = weights.copies[:, None, None]
        found -= copies[..., None] * ways.forward_s[:, None]
        found[:, :, ways.offload] += copies * ways.copy_s
    least: Matrix = found.min(axis=2)
    return least
