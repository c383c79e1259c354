"""Learnt while running: whoever would have found most lately says who leaves.

Four are asked: counts of all look-ups so far (those that were made before come first, if there are
any), counts that are forgotten, uses since a row came (LFU), and the last use (LRU). Each has a
ghost, a cache without values over a sample of the rows, with as small a share of the slots
(Waldspurger et al. 2015, SHARDS). Where ids keep to one distribution, counts of all win, and come
close to the rows that occur most; where they drift, these lose, and the cache is no worse than LFU
or LRU but for the time it takes to see that.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.forms.cache.policies import Floats, Ints
from meshwright.forms.cache.policies.lfu import UsesHere
from meshwright.forms.cache.policies.lru import LastUse
from meshwright.forms.cache.slots import SlotMap

GHOST_SLOTS = 512
"""Of a ghost at least, if the cache has as many: fewer would say too little."""
MOST_THINNED = 16
HALF_LIFE = 8
"""Look-ups per slot after which a count that is forgotten weighs half."""
WINDOW = 4
"""Look-ups per slot after which what a ghost has found weighs half."""
MARGIN = 0.002
"""By which another has to find more of the look-ups before it is followed."""
_LARGEST = 1e12


class _ByScore:
    """Rows by a score of which somebody else takes care."""

    def __init__(self, score: Floats) -> None:
        self.score = score

    def used(self, rows: Ints, at: Ints, times: Ints) -> None:
        """Scores are kept elsewhere."""

    def placed(self, rows: Ints, at: Ints) -> None:
        """The same."""

    def worth(self, rows: Ints, at: Ints) -> Floats:
        """The score."""
        return self.score[rows]

    def cleared(self) -> None:
        """The same."""

    def grown(self, slots: int) -> None:
        """Scores are of rows."""


class _Of(_ByScore):
    """The same of some rows that have numbers of their own."""

    def __init__(self, score: Floats, sample: Ints) -> None:
        super().__init__(score)
        self._sample = sample

    def worth(self, rows: Ints, at: Ints) -> Floats:
        """The score."""
        return self.score[self._sample[rows]]


class _Expert(Protocol):
    def used(self, rows: Ints, at: Ints, times: Ints) -> None: ...
    def placed(self, rows: Ints, at: Ints) -> None: ...
    def worth(self, rows: Ints, at: Ints) -> npt.NDArray[np.int64] | Floats: ...
    def cleared(self) -> None: ...
    def grown(self, slots: int) -> None: ...


class Learnt:
    """The four, their ghosts, and whom the cache follows."""

    def __init__(self, rows: int, slots: int, counts: Floats | None) -> None:
        ever = np.zeros(rows) if counts is None else counts.astype(np.float64)
        self._ever, self._lately, self._weight = ever, np.zeros(rows), 1.0
        self._forgets = 0.5 ** (1 / (HALF_LIFE * slots))
        self.experts: dict[str, _Expert] = {
            "ever": _ByScore(self._ever), "lately": _ByScore(self._lately),
            "lfu": UsesHere(slots), "lru": LastUse(slots),
        }  # fmt: skip
        # What nobody has counted is to be no worse than LRU from the beginning.
        self.leader = "lru" if counts is None else "ever"
        self._sample(rows, slots)

    def _sample(self, rows: int, slots: int) -> None:
        thin = int(min(max(slots // GHOST_SLOTS, 1), MOST_THINNED))
        # Numbers that say nothing of which rows are near each other: Knuth's multiplicative hash.
        hashed = (np.arange(rows, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(2**32)
        sample = np.flatnonzero(hashed < np.uint64(2**32 // thin)) if thin > 1 else np.arange(rows)
        self._number = np.full(rows, -1, dtype=np.int32)
        self._number[sample] = np.arange(len(sample))
        own = min(max(1, slots // thin), len(sample))
        made: dict[str, _Expert] = {
            "ever": _Of(self._ever, sample), "lately": _Of(self._lately, sample),
            "lfu": UsesHere(own), "lru": LastUse(own),
        }  # fmt: skip
        self._ghosts = {name: SlotMap(len(sample), own, expert) for name, expert in made.items()}
        self._found = dict.fromkeys(made, 0.0)
        self._looked, self._window = 0.0, WINDOW * own

    def used(self, rows: Ints, at: Ints, times: Ints) -> None:
        """Counts, asks the ghosts, and follows whoever has found most lately."""
        numbers = self._number[rows]
        is_sampled = numbers >= 0
        if is_sampled.any():
            self._ask(numbers[is_sampled].astype(np.int64), times[is_sampled])
        self._ever[rows] += times
        self._lately[rows] += self._weight * times
        self._weight /= self._forgets ** float(times.sum())
        if self._weight > _LARGEST:
            self._lately /= self._weight
            self._weight = 1.0
        for name in ("lfu", "lru"):
            self.experts[name].used(rows, at, times)

    def _ask(self, rows: Ints, times: Ints) -> None:
        fades = 0.5 ** (float(times.sum()) / self._window)
        self._looked = self._looked * fades + float(times.sum())
        for name, ghost in self._ghosts.items():
            before = ghost.counts.lookups_here
            for part in range(0, len(rows), ghost.slots):
                some = slice(part, part + ghost.slots)
                ghost.admit(rows[some], times[some])
                ghost.release(rows[some])
            self._found[name] = self._found[name] * fades + ghost.counts.lookups_here - before
        best = max(self._found, key=self._found.__getitem__)
        if self._found[best] > self._found[self.leader] + MARGIN * self._looked:
            self.leader = best

    def placed(self, rows: Ints, at: Ints) -> None:
        """All get to know."""
        for expert in self.experts.values():
            expert.placed(rows, at)

    def worth(self, rows: Ints, at: Ints) -> npt.NDArray[np.int64] | Floats:
        """What the leader says."""
        return self.experts[self.leader].worth(rows, at)

    def cleared(self) -> None:
        """What was learnt stays."""
        for expert in self.experts.values():
            expert.cleared()

    def grown(self, slots: int) -> None:
        """Ghosts stay as they are: a share of the slots that were there."""
        for expert in self.experts.values():
            expert.grown(slots)


def make(rows: int, slots: int, counts: Floats | None) -> Learnt:
    """Returns the policy; counts are what it begins with."""
    return Learnt(rows, slots, counts)
