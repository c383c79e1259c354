"""What the blocks of a model need under each mesh, and what weighs against what in a relaxation."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.planner.across.spans import Matrix


class BlockWays(NamedTuple):
    """What blocks need: arrays over [mesh, mode, block]."""

    busy_s: Matrix
    load_s: Matrix
    """With what comes once per step, shared out over the micro-batches."""
    state_bytes: Matrix
    flight_bytes: Matrix
    room: float
    prices: tuple[float, ...]
    """Of memory, in seconds per byte."""
    input_s: Matrix
    """[mesh, mode, block]: without the weight half of backwards."""
    forward_s: Matrix
    """[mesh, block]"""
    forward_share: Matrix
    """[mesh]: the most that the forward is of any block's work."""
    copy_s: Matrix
    """[mesh, block]: moving to the host what a block holds inside; zeros where nothing is moved."""
    offload: int
    """Number of the mode in which that is done; -1 if there is none."""
    spared_s: Matrix
    """[mesh]: waits for what was moved that may be shorter, in all."""


class Totals(NamedTuple):
    """Of a micro-batch in the whole model; arrays over meshes, or of the best of them."""

    busy_s: Matrix
    load_s: Matrix
    input_s: Matrix
    forward_s: Matrix
    share: Matrix


def multipliers(ways: BlockWays, flights: Matrix) -> Iterator[tuple[float, float]]:
    """Prices of memory; and weights of copying against computing in a forward, as far as they must
    go on at the same time. The second is best where moving a byte costs just its price."""
    for price in ways.prices:
        yield price, 0.0
        if ways.offload >= 0 and price:
            saved = (ways.flight_bytes[:, 0] - ways.flight_bytes[:, ways.offload]) * flights
            used = ways.copy_s > 0
            if used.any():
                gain = float(np.median(saved[used] / ways.copy_s[used]))
                yield price, min(1.0, price * gain)


def both_waits(ways: BlockWays) -> tuple[BlockWays, ...]:
    """The ways as they are; and with no wait for what was moved, of which then none is spared:
    the better bound where memory costs nothing."""
    if ways.offload < 0:
        return (ways,)
    busy, load = ways.busy_s.copy(), ways.load_s.copy()
    busy[:, ways.offload], load[:, ways.offload] = busy[:, 0], load[:, 0]
    spared = np.zeros_like(ways.spared_s)
    return ways, ways._replace(busy_s=busy, load_s=load, spared_s=spared, prices=(0.0,))


def weighed(ways: BlockWays, cost: Matrix, weight: float) -> Matrix:
    """The forward of a stage is as long as its computing and as its copies but for the last two:
    so it is as long as any mean of both."""
    if not weight:
        return cost
    found = cost - weight * ways.forward_s[:, None]
    found[:, ways.offload] += weight * ways.copy_s
    return found
