"""Small steps from partitions that an agent has found: one or two groups decided otherwise."""

from collections.abc import Iterator
from itertools import combinations

from meshwright.planner.searchers.dqn.operators import Operators, Partition

PAIRS = 12
"""Groups up to which two are decided otherwise at once."""


def best_of(agent: Operators) -> Partition:
    """The first of the best so far."""
    return min(agent.found.values(), key=lambda found: (found.verdict, found.bits))


def flipped(agent: Operators, most: int) -> Iterator[Partition]:
    """Moves to the best neighbour while that is better; at most so many partitions in all."""
    while True:
        before = best_of(agent)
        for bits in _near(agent, before.bits):
            if bits not in agent.found and agent.is_legal(bits):
                if len(agent.found) >= most:
                    return
                yield agent.judged(bits)
        if best_of(agent) == before:
            return


def _near(agent: Operators, bits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for number in (1, 2) if len(bits) <= PAIRS else (1,):
        for groups in combinations(range(len(bits)), number):
            found = bits
            for group in groups:
                found = _otherwise(agent, found, group)
            yield found


def _otherwise(agent: Operators, bits: tuple[int, ...], group: int) -> tuple[int, ...]:
    """With one group decided otherwise; what is split drives out those it leaves no place."""
    if bits[group]:
        return tuple(0 if i == group else bit for i, bit in enumerate(bits))
    rivals = agent.linkage.rivals(group)
    return tuple(1 if i == group else 0 if i in rivals else bit for i, bit in enumerate(bits))
