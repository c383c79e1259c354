"""Which cases of a slow test run by default: a third, chosen by name, so that all machines and days
run the same. `make test-all` (`pytest --all-cases`) runs every case.
"""

import os
from collections.abc import Iterable, Mapping
from zlib import crc32

ALL_CASES = "MESHWRIGHT_ALL_CASES"
ONE_OF = 3


def in_turn(names: Iterable[str], turn: int) -> tuple[str, ...]:
    """A third of the names, one at least, in their order; each has its turn in three of them."""
    found = tuple(names)
    if os.environ.get(ALL_CASES):
        return found
    kept = _ranked(found)[turn % min(ONE_OF, len(found)) :: ONE_OF]
    return tuple(name for name in found if name in kept)


def picked(cases: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """A third of the cases, one at least, of which it is said what they are made of: those come
    first that have most of what none before them has."""
    if os.environ.get(ALL_CASES):
        return frozenset(cases)
    left, seen = _ranked(cases), frozenset[str]()
    kept = set[str]()
    for _ in range(-(-len(cases) // ONE_OF)):
        best = max(left, key=lambda name: len(cases[name] - seen))
        left.remove(best)
        kept.add(best)
        seen |= cases[best]
    return frozenset(kept)


def _ranked(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: crc32(name.encode()))
