"""Small steps from good choices to better ones, each simulated.

Where a step changes the number of micro-batches or a mesh, stages need other activations kept than
before. So such a step is also taken with as little recomputed or moved as lets it fit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.planner.across.refine import neighbours
from meshwright.planner.problem.candidates import Choice
from meshwright.planner.searchers.dqn.drafts import Sketches
from meshwright.planner.searchers.dqn.fit import tried
from meshwright.planner.searchers.dqn.judge import Judge, Verdict

Ranked = Sequence[tuple[Choice, Verdict]]
Family = tuple[int, object, bool]
"""Ranks, model mesh of the first stage, whether replicas share state."""


def family(choice: Choice) -> Family:
    """Choices that small steps may turn into one another."""
    first = choice.stages[0]
    return choice.num_ranks, first.model, first.exchange.is_split("optimizer")


def starts(judge: Judge, number: int) -> Ranked:
    """The best choice of each family, of so many families."""
    firsts: dict[Family, tuple[Choice, Verdict]] = {}
    for choice, verdict in sorted(judge.seen.items(), key=lambda item: item[1]):
        firsts.setdefault(family(choice), (choice, verdict))
    return list(firsts.values())[:number]


@dataclass(frozen=True, slots=True)
class Improver:
    """Steps of one problem; `hopeless` says what need not be simulated."""

    judge: Judge
    sketches: Sketches
    hopeless: Callable[[Choice], bool]
    timed: bool
    """Whether the objective is a time: else less memory is always of use."""

    def climb(self, choice: Choice, verdict: Verdict) -> Iterator[Choice]:
        """Moves to the best neighbour while that is better, and where none is, to the best that is
        two steps away; yields after each simulation."""
        while True:
            for reach in (self._near, self._far):
                found: list[tuple[Verdict, int, Choice]] = []
                for near in reach(choice, tight=not self.timed or not verdict.fits):
                    found.append((self.judge(near), len(found), near))
                    yield near
                if found and min(found)[0] < verdict:
                    verdict, _, choice = min(found)
                    break
            else:
                return

    def _near(self, choice: Choice, *, tight: bool) -> Iterator[Choice]:
        problem, sets = self.judge.problem, self.sketches.sets
        for near in neighbours(problem, choice, sets, tight=tight):
            if _is_moved(choice, near):
                yield from self._refitted(near)
            if self._is_open(near):
                yield near

    def _far(self, choice: Choice, *, tight: bool) -> Iterator[Choice]:
        """Other numbers of micro-batches on other meshes."""
        problem, sets = self.judge.problem, self.sketches.sets
        for other in neighbours(problem, choice, sets, tight=tight):
            if other.num_microbatches == choice.num_microbatches:
                continue
            for far in neighbours(problem, other, sets, tight=tight):
                if far.num_microbatches == other.num_microbatches and _is_moved(other, far):
                    yield from self._refitted(far)

    def _refitted(self, near: Choice) -> Iterator[Choice]:
        again = self.sketches.refitted(near)
        if self._is_open(again):
            yield from tried(self.judge, self.sketches, again)

    def _is_open(self, choice: Choice) -> bool:
        return choice not in self.judge.seen and not self.hopeless(choice)


def _is_moved(choice: Choice, near: Choice) -> bool:
    """Whether activations take other room than before."""
    if choice.num_microbatches != near.num_microbatches:
        return True
    if len(choice.stages) != len(near.stages):
        return False
    pairs = zip(choice.stages, near.stages, strict=True)
    return any((a.dp, a.dp_shard, a.model, a.zero) != (b.dp, b.dp_shard, b.model, b.zero)
               for a, b in pairs)  # fmt: skip
