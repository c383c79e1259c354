"""What it takes to bring values from one placement on a mesh to another: steps, axis by axis.

The order is that of `ir.layout.paths`, followed here for all pairs of placements at once: what
makes a value smaller comes first, and a split that is in everyone's way is made whole. A step moves
what the other axes leave of the value at that time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.layout.conversions import Conversion, Primitive
from meshwright.ir.layout.layout import Placement, R, Shard, units_of
from meshwright.planner.inside.joint import Sizes, nesting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Places = Ints
"""Place x axis: numbers of placements."""


@dataclass(frozen=True, slots=True)
class AxisMove:
    """One conversion on one axis, of the share of a value that the other axes leave."""

    axis: int
    forward: Primitive
    backward: Primitive
    share: float


@dataclass(frozen=True, slots=True)
class MoveTable:
    """The steps of all moves from some places to others."""

    steps: tuple[AxisMove, ...]
    codes: tuple[Ints, ...]
    """First steps, second steps, ... of each move; 0 for none, else one more than the step."""
    shape: tuple[int, int]

    def cost(self, seconds: Callable[[AxisMove], float]) -> Floats:
        """Sums of what the steps cost."""
        each = np.array([0.0, *map(seconds, self.steps)])
        total = np.zeros(self.shape)
        for codes in self.codes:
            total += each[codes]
        return total


@dataclass(slots=True)
class Moves:
    """Placements by number, and tables of moves between them on one mesh; kept once made."""

    sizes: Sizes
    placements: list[Placement] = field(default_factory=lambda: [R])
    numbers: dict[Placement, int] = field(default_factory=lambda: {R: 0})
    known: dict[tuple[tuple[int, ...], bytes, bytes], MoveTable] = field(default_factory=dict)

    def number(self, placement: Placement) -> int:
        if placement not in self.numbers:
            self.numbers[placement] = len(self.placements)
            self.placements.append(placement)
        return self.numbers[placement]

    def combined(self, found: Sequence[Sequence[Placement]], picks: Ints) -> Places:
        """The numbers of combinations of placements that were found per axis."""
        columns = [
            np.array([self.number(p) for p in own], np.int64)[picks[:, axis]]
            for axis, own in enumerate(found)
        ]
        return np.stack(columns, 1)

    def listed(self, places: Sequence[Sequence[Placement]]) -> Places:
        return np.array([[self.number(p) for p in place] for place in places], np.int64)

    def table(self, shape: tuple[int, ...], sources: Places, targets: Places) -> MoveTable:
        key = (shape, sources.tobytes(), targets.tobytes())
        if key not in self.known:
            self.known[key] = _Walk.of(self, shape, sources, targets).table()
        return self.known[key]


@dataclass(slots=True)
class _Walk:
    """All moves on their way. Placements are numbered per axis here; 0 is whole."""

    sizes: Sizes
    now: list[Ints]
    goals: list[Ints]
    kinds: list[Ints]
    """Per axis, from x to: the primitives of both ways, as one number."""
    growth: list[Ints]
    shares: list[Floats]
    split: list[Bools]
    agree: dict[tuple[int, int], Bools]
    """Placements on one axis x those on another that nest."""
    extent: tuple[int, int]

    @classmethod
    def of(cls, moves: Moves, shape: tuple[int, ...], sources: Places, targets: Places) -> "_Walk":
        extent = (len(sources), len(targets))
        now, goals, found = [], [], []
        for axis in range(len(moves.sizes)):
            ids = np.unique(np.concatenate([[0], sources[:, axis], targets[:, axis]]))
            before, after = (np.searchsorted(ids, p[:, axis]) for p in (sources, targets))
            now.append(np.repeat(before, extent[1]))
            goals.append(np.tile(after, extent[0]))
            found.append([moves.placements[i] for i in ids.tolist()])
        agree = {
            (a, b): nesting(shape, found[a], moves.sizes[a], found[b], moves.sizes[b])
            for a in range(len(found))
            for b in range(len(found))
            if a != b
        }
        return cls(
            moves.sizes, now, goals,
            [_pairs(own, _kind) for own in found],
            [_pairs(own, _growth) for own in found],
            [_shares(shape, own, n) for own, n in zip(found, moves.sizes, strict=True)],
            [np.array([isinstance(p, Shard) for p in own]) for own in found],
            agree, extent,
        )  # fmt: skip

    def table(self) -> MoveTable:
        """Step after step of all moves, until all have arrived."""
        keys: dict[tuple[int, int, float], int] = {}
        codes = []
        while (ahead := [n != g for n, g in zip(self.now, self.goals, strict=True)]) and any(
            pending.any() for pending in ahead
        ):
            axis, direct = self._next(ahead)
            codes.append(self._step(axis, direct, keys))
        steps = tuple(AxisMove(a, *_both(kind), left) for a, kind, left in keys)
        return MoveTable(steps, tuple(codes), self.extent)

    def _next(self, ahead: Sequence[Bools]) -> tuple[Ints, Bools]:
        """Which axis moves: -1 for none; and whether to its goal, or out of the way."""
        count = len(ahead[0])
        best, direct = np.full(count, 9, np.int64), np.zeros(count, np.bool_)
        axis = np.full(count, -1, np.int64)
        for to_goal in (True, False):
            for a, pending in enumerate(ahead):
                may = pending & (self._is_free(a) if to_goal else self.split[a][self.now[a]])
                growth = self.growth[a][self.now[a], self.goals[a]]
                wins = may & ~(direct & (not to_goal)) & (growth < best)
                axis, best = np.where(wins, a, axis), np.where(wins, growth, best)
                direct |= wins & to_goal
            best = np.where(direct, -1, 9)
        return axis, direct

    def _is_free(self, axis: int) -> Bools:
        """Whether the goal on this axis nests with where the others are."""
        free = np.ones(len(self.now[axis]), np.bool_)
        for other, now in enumerate(self.now):
            if other != axis:
                free &= self.agree[axis, other][self.goals[axis], now]
        return free

    def _step(self, axis: Ints, direct: Bools, keys: dict[tuple[int, int, float], int]) -> Ints:
        """One axis of each move moves; the codes of these steps."""
        codes = np.zeros(len(axis), np.int64)
        for a in range(len(self.now)):
            moved = np.flatnonzero(axis == a)
            left = np.ones(len(moved))
            for other, now in enumerate(self.now):
                if other != a:
                    left *= self.shares[other][now[moved]]
            after = np.where(direct[moved], self.goals[a][moved], 0)
            codes[moved] = _numbered(a, self.kinds[a][self.now[a][moved], after], left, keys) + 1
            self.now[a][moved] = after
        return codes.reshape(self.extent)


def _numbered(axis: int, kind: Ints, left: Floats, keys: dict[tuple[int, int, float], int]) -> Ints:
    """The number of each step in `keys`, which grow by those that are new."""
    shares, which = np.unique(left, return_inverse=True)
    both, at = np.unique(kind * max(len(shares), 1) + which.reshape(-1), return_inverse=True)
    found = [
        keys.setdefault((axis, b // len(shares), float(shares[b % len(shares)])), len(keys))
        for b in both.tolist()
    ]
    return np.asarray(np.array(found, np.int64)[at.reshape(-1)])


def _shares(shape: tuple[int, ...], found: Sequence[Placement], ranks: int) -> Floats:
    return np.array([share(shape, p, ranks) for p in found])


def _pairs(found: Sequence[Placement], value: Callable[[Placement, Placement], int]) -> Ints:
    return np.array([[value(p, q) for q in found] for p in found], np.int64)


_PRIMITIVES = tuple(Primitive)


@cache
def _kind(source: Placement, target: Placement) -> int:
    conversion = Conversion(source, target)
    forward = _PRIMITIVES.index(conversion.forward)
    return forward * len(_PRIMITIVES) + _PRIMITIVES.index(conversion.backward)


def _both(kind: int) -> tuple[Primitive, Primitive]:
    forward, backward = divmod(kind, len(_PRIMITIVES))
    return _PRIMITIVES[forward], _PRIMITIVES[backward]


def _growth(source: Placement, target: Placement) -> int:
    """When the step comes, as in `ir.layout.paths`."""
    if isinstance(target, Shard):
        return 0
    return 2 if isinstance(source, Shard) else 1


def share(shape: tuple[int, ...], placement: Placement, ranks: int) -> float:
    """What part of a value the rank with most of it holds."""
    if not isinstance(placement, Shard):
        return 1.0
    units = units_of(shape[placement.dim], placement)
    return -(-units // ranks) / units
