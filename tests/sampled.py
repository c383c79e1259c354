"""Which cases of a slow test run by default: a third, chosen by name, so that all machines and days
run the same. `make test-all` (`pytest --all-cases`) runs every case.
"""

import os
from collections.abc import Iterable
from zlib import crc32

ALL_CASES = "MESHWRIGHT_ALL_CASES"
ONE_OF = 3


def picked(names: Iterable[str], beside: str = "") -> tuple[str, ...]:
    """A third of the names, one at least, in their order; others beside another word."""
    found = tuple(names)
    if os.environ.get(ALL_CASES):
        return found
    ranked = sorted(found, key=lambda name: crc32(f"{beside}{name}".encode()))
    kept = set(ranked[: -(-len(found) // ONE_OF)])
    return tuple(name for name in found if name in kept)
