"""What it takes to bring a value from one placement on a mesh to another: steps, axis by axis.

The order is that of `ir.paths`: what makes a value smaller comes first. A step moves what the other
axes have left of the value at that time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.conversions import Conversion
from meshwright.ir.layout import Axis, Placement, Shard, units_of
from meshwright.ir.paths import path
from meshwright.ir.plan import ModelMesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Place = tuple[Placement, ...]
"""A placement per axis of the mesh."""
Seconds = Callable[[int, Conversion, float], float]
"""Of a conversion on an axis, by the share of the value that the other axes leave."""


@dataclass(slots=True)
class Moves:
    """Prices of moves on one mesh; steps are kept, as many values have equal shapes."""

    mesh: ModelMesh
    known: dict[tuple[tuple[int, ...], Place, Place], tuple[tuple[int, Conversion, float], ...]] = (
        field(default_factory=dict)
    )

    def price(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Place],
        targets: Sequence[Place],
        seconds: Seconds,
    ) -> Floats:
        """Seconds of each move; `seconds` is asked per axis, conversion and share of the value."""
        found = self._free(shape, sources, targets, seconds)
        touched = _conflicts(sources, targets)
        for i, j in np.argwhere(touched):
            found[i, j] = sum(seconds(*s) for s in self.steps(shape, sources[i], targets[j]))
        return found

    def steps(
        self, shape: tuple[int, ...], source: Place, target: Place
    ) -> tuple[tuple[int, Conversion, float], ...]:
        """Axis, conversion, and the share of the value that the other axes leave."""
        key = (shape, source, target)
        if key not in self.known:
            self.known[key] = tuple(self._steps(shape, source, target))
        return self.known[key]

    def _steps(
        self, shape: tuple[int, ...], source: Place, target: Place
    ) -> list[tuple[int, Conversion, float]]:
        names = [name for name, _ in self.mesh]
        axes = {name: Axis(size) for name, size in self.mesh}
        now, found = list(source), []
        wanted = dict(zip(names, target, strict=True))
        for name, placement in path(shape, dict(zip(names, now, strict=True)), wanted, axes):
            at = names.index(name)
            left = 1.0
            for other, (_, size) in enumerate(self.mesh):
                left *= share(shape, now[other], size) if other != at else 1.0
            found.append((at, Conversion(now[at], placement), left))
            now[at] = placement
        return found

    def _free(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Place],
        targets: Sequence[Place],
        seconds: Seconds,
    ) -> Floats:
        """Moves whose axes are in nobody's way."""
        tables = [
            _Table.of(shape, [p[a] for p in sources], [q[a] for q in targets], size)
            for a, (_, size) in enumerate(self.mesh)
        ]
        total = np.zeros((len(sources), len(targets)))
        for a, table in enumerate(tables):
            left = np.ones_like(total)
            for b, other in enumerate(tables):
                if b != a:
                    first = (other.growth < table.growth) | (
                        (other.growth == table.growth) & (b < a)
                    )
                    left *= np.where(first, other.after[None, :], other.before[:, None])
            total += table.cost(left, partial(seconds, a))
        return total


@dataclass(frozen=True, slots=True)
class _Table:
    """One axis of many moves."""

    conversions: tuple[Conversion, ...]
    kind: Ints
    """Source x target: which of the conversions; -1 for none."""
    growth: Ints
    before: Floats
    after: Floats

    @classmethod
    def of(
        cls, shape: tuple[int, ...], sources: Sequence[Placement], targets: Sequence[Placement],
        size: int,
    ) -> "_Table":  # fmt: skip
        left, right = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        found: dict[Conversion, int] = {}
        kind = np.full((len(left), len(right)), -1, np.int64)
        growth = np.full((len(left), len(right)), 3, np.int64)
        for i, p in enumerate(left):
            for j, q in enumerate(right):
                if p != q:
                    kind[i, j] = found.setdefault(Conversion(p, q), len(found))
                    growth[i, j] = _growth(p, q)
        rows = np.array([left.index(p) for p in sources], np.int64)
        columns = np.array([right.index(q) for q in targets], np.int64)
        cells = np.ix_(rows, columns)
        return cls(
            tuple(found), kind[cells], growth[cells],
            np.array([share(shape, p, size) for p in sources]),
            np.array([share(shape, q, size) for q in targets]),
        )  # fmt: skip

    def cost(self, left: Floats, seconds: Callable[[Conversion, float], float]) -> Floats:
        """Each (conversion, share) is asked for once."""
        shares, which = np.unique(left, return_inverse=True)
        code = np.where(self.kind < 0, -1, self.kind * len(shares) + which.reshape(left.shape))
        codes, at = np.unique(code, return_inverse=True)
        found = [
            0.0 if c < 0 else seconds(self.conversions[c // len(shares)], shares[c % len(shares)])
            for c in codes.tolist()
        ]
        return np.array(found)[at.reshape(left.shape)]


def _growth(source: Placement, target: Placement) -> int:
    """Rank of the step in `ir.paths`."""
    if isinstance(target, Shard):
        return 0
    return 2 if isinstance(source, Shard) else 1


def share(shape: tuple[int, ...], placement: Placement, ranks: int) -> float:
    """What part of a value the rank with most of it holds."""
    if not isinstance(placement, Shard):
        return 1.0
    units = units_of(shape[placement.dim], placement)
    return -(-units // ranks) / units


def _conflicts(sources: Sequence[Place], targets: Sequence[Place]) -> NDArray[np.bool_]:
    """Moves in which two axes change that split one dim, before or after."""
    found = np.zeros((len(sources), len(targets)), np.bool_)
    touched: list[tuple[NDArray[np.bool_], Ints]] = []
    for axis in range(len(sources[0]) if sources else 0):
        left, right = [p[axis] for p in sources], [q[axis] for q in targets]
        numbers = {p: i for i, p in enumerate(dict.fromkeys((*left, *right)))}
        before = np.array([numbers[p] for p in left]), np.array([_bit(p) for p in left], np.int64)
        after = np.array([numbers[q] for q in right]), np.array([_bit(q) for q in right], np.int64)
        changed = before[0][:, None] != after[0][None, :]
        dims = before[1][:, None] | after[1][None, :]
        for other_changed, other_dims in touched:
            found |= changed & other_changed & ((dims & other_dims) > 0)
        touched.append((changed, dims))
    return found


def _bit(placement: Placement) -> int:
    return 1 << placement.dim if isinstance(placement, Shard) else 0
