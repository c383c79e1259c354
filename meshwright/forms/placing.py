"""Which rank owns which matrix: work that cannot be split is shared out whole.

A task is done by one rank, which tells the others, or by all ranks, each for itself. A step takes
as long as what all do, what is told, and what the rank with most to do has of its own. Few tasks
are shared out exactly, by branch and bound; many by the longest first (Graham 1969), then moved and
swapped. What comes out depends on the arguments only, never on clocks: all ranks find the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

ALL = -1
"""In place of an owner: every rank does the task."""
_FEW, _NODES = 64, 20_000
"""Tasks up to which, and beginnings within which, the best is searched for."""
_PASSES = 2_000
"""Moves and swaps."""
_NEAR = 1e-12
"""What is nearer to the best than this share of it is no gain."""

Shape = tuple[int, ...]


class MatrixTask(NamedTuple):
    """Work on one matrix, in any unit that is the same for all."""

    work: float
    told: float = 0.0
    """What it takes until the others have what its owner made."""


@dataclass(frozen=True, slots=True)
class Owners:
    """Who owns what."""

    of: tuple[int, ...]
    """Per task: a rank, or `ALL`."""
    loads: tuple[float, ...]
    """Per rank: work of its own."""
    takes: float
    """What a step takes."""
    proven: bool
    """Nothing is better."""


WEIGHTS: Mapping[str, Callable[[int, int], float]] = {
    "products": lambda rows, columns: float(rows) * columns * min(rows, columns),
    "values": lambda rows, columns: float(rows) * columns,
    "inverses": lambda rows, columns: float(rows) ** 3 + float(columns) ** 3,
}
"""Work on a matrix, by what it is made of: products with its Gram matrix (Newton-Schulz), steps of
single values, factorisations of both of its sides (K-FAC, Shampoo)."""


def weight(shape: Shape, kind: str) -> float:
    """Returns the work on a parameter, of which all dims but the first are columns; a vector has
    that of its values. `kind`: a key of `WEIGHTS`."""
    if len(shape) < 2:
        return float(prod(shape))
    return WEIGHTS[kind](shape[0], prod(shape[1:]))


def placed(tasks: Sequence[MatrixTask], ranks: int, *, by_all: bool = False) -> Owners:
    """Returns who owns which task; `by_all`: every rank may do one for itself. Equal arguments have
    equal results everywhere."""
    order = sorted(range(len(tasks)), key=lambda i: (-tasks[i].work, -tasks[i].told, i))
    first = _Placing(tasks, ranks)
    for i in order:
        alone = by_all and tasks[i].work <= tasks[i].told
        first.put(i, ALL if alone else min(range(ranks), key=lambda r: (first.loads[r], r)))
    first.improve(by_all)
    search = _PlacingSearch(tasks, order, ranks, by_all, first)
    proven = search.run()
    return search.best.owners(proven)


class _Placing:
    """An assignment that changes."""

    def __init__(self, tasks: Sequence[MatrixTask], ranks: int) -> None:
        self.tasks, self.ranks = tasks, ranks
        self.of: list[int] = [ALL] * len(tasks)
        self.loads = [0.0] * ranks
        self.common = sum([task.work for task in tasks])
        """What all ranks wait for: work that all do, and what is told."""

    @property
    def takes(self) -> float:
        return self.common + max(self.loads, default=0.0)

    def put(self, i: int, rank: int) -> None:
        """Gives a task to another owner."""
        task, before = self.tasks[i], self.of[i]
        if before == ALL:
            self.common -= task.work
        else:
            self.loads[before] -= task.work
            self.common -= task.told
        if rank == ALL:
            self.common += task.work
        else:
            self.loads[rank] += task.work
            self.common += task.told
        self.of[i] = rank

    def improve(self, by_all: bool) -> None:
        """Moves and swaps tasks of the busiest rank while that helps."""
        for _ in range(_PASSES):
            if not self._moved(by_all):
                return

    def _moved(self, by_all: bool) -> bool:
        now = self.takes
        busiest = max(range(self.ranks), key=lambda r: (self.loads[r], -r))
        least = min(range(self.ranks), key=lambda r: (self.loads[r], r))
        mine = [i for i, rank in enumerate(self.of) if rank == busiest]
        others = [j for j, rank in enumerate(self.of) if rank not in (busiest, ALL)]
        gain, best = now * _NEAR, None
        for i in mine:
            for rank in (least, *([ALL] if by_all else [])):
                gain, best = self._tried(now, gain, best, [(i, rank)], [(i, busiest)])
            for j in others:
                if self.tasks[j].work < self.tasks[i].work:
                    theirs = self.of[j]
                    gain, best = self._tried(
                        now, gain, best, [(i, theirs), (j, busiest)], [(i, busiest), (j, theirs)]
                    )
        for move in best or ():
            self.put(*move)
        return best is not None

    def _tried(
        self,
        now: float,
        gain: float,
        best: list[tuple[int, int]] | None,
        moves: list[tuple[int, int]],
        back: list[tuple[int, int]],
    ) -> tuple[float, list[tuple[int, int]] | None]:
        for move in moves:
            self.put(*move)
        found = now - self.takes
        for move in back:
            self.put(*move)
        return (found, moves) if found > gain else (gain, best)

    def copy(self) -> "_Placing":
        made = _Placing(self.tasks, self.ranks)
        made.of, made.loads, made.common = list(self.of), list(self.loads), self.common
        return made

    def owners(self, proven: bool) -> Owners:
        # Summed anew, in one order: what moves left is not in it.
        loads, common = [0.0] * self.ranks, 0.0
        for task, rank in zip(self.tasks, self.of, strict=True):
            if rank == ALL:
                common += task.work
            else:
                loads[rank] += task.work
                common += task.told
        return Owners(tuple(self.of), tuple(loads), common + max(loads, default=0.0), proven)


class _PlacingSearch:
    """Branch and bound, the longest task first; of ranks with equal loads one is tried."""

    def __init__(
        self,
        tasks: Sequence[MatrixTask],
        order: Sequence[int],
        ranks: int,
        by_all: bool,
        first: _Placing,
    ) -> None:
        self._tasks, self._order, self._ranks, self._by_all = tasks, order, ranks, by_all
        self.best, self._least = first, first.takes
        self._nodes = 0
        # What is left from each task on: at least so much per rank, and so much in common.
        self._work = [0.0] * (len(order) + 1)
        for at in range(len(order) - 1, -1, -1):
            task = tasks[order[at]]
            share = task.work / ranks + task.told
            least = min(share, task.work) if by_all else share
            self._work[at] = self._work[at + 1] + least

    def run(self) -> bool:
        """Whether all was looked at."""
        draft = _Placing(self._tasks, self._ranks)
        draft.common = 0.0
        if len(self._tasks) > _FEW:
            return self._bound(0, draft) >= self._least * (1 - _NEAR)
        self._from(0, draft)
        return self._nodes < _NODES

    def _from(self, at: int, draft: _Placing) -> None:
        self._nodes += 1
        if self._nodes >= _NODES or self._bound(at, draft) >= self._least * (1 - _NEAR):
            return
        if at == len(self._order):
            self.best, self._least = draft.copy(), draft.takes
            return
        i = self._order[at]
        task, seen = self._tasks[i], set[float]()
        for rank in sorted(range(self._ranks), key=lambda r: (draft.loads[r], r)):
            load = draft.loads[rank]
            if load in seen:
                continue
            seen.add(load)
            draft.of[i], draft.loads[rank] = rank, load + task.work
            draft.common += task.told
            self._from(at + 1, draft)
            draft.of[i], draft.loads[rank] = ALL, load
            draft.common -= task.told
        if self._by_all:
            draft.common += task.work
            self._from(at + 1, draft)
            draft.common -= task.work

    def _bound(self, at: int, draft: _Placing) -> float:
        """No end of this beginning takes less: loads level out at best."""
        level = sum(draft.loads) / self._ranks
        left = self._work[at]
        return draft.common + max(level + left, max(draft.loads, default=-inf))
