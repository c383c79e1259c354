"""`python -m benchmarks.attack [PART ...] --size N --seed S`: every attack, and what did not hold.

A part is a file of this folder with a function `attacks(size, seed)` that yields a `Result` each.
Tests run the same parts at a small size.
"""

import argparse
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks.attack.result import Result

Attacks = Callable[[int, int], Iterator[Result]]
TELL_S = 60.0


def parts() -> dict[str, Attacks]:
    """The parts by name: the files of this folder that have a function `attacks`."""
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = {
        name: import_module(f"benchmarks.attack.{name}") for name in names if name != "__main__"
    }
    return {name: made.attacks for name, made in modules.items() if hasattr(made, "attacks")}


def main() -> int:
    """Runs the parts asked for; the number of attacks that did not hold, at most 1."""
    known = parts()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help=f"one or more of {', '.join(known)}; default all")
    parser.add_argument("--size", type=int, default=100, help="percent of the full size")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if unknown := set(given.part) - set(known):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = 0
    for name in given.part or known:
        failed += _run(name, known[name](given.size, given.seed))
    return int(failed > 0)


def _run(name: str, results: Iterator[Result]) -> int:
    """Tells what did not hold, and every minute how far it is; the number that did not."""
    console = Console(soft_wrap=True, markup=False)
    count = held = 0
    told_s = time.monotonic()
    try:
        for result in results:
            count, held = count + 1, held + result.held
            if not result.held:
                console.print(f"{name}: {result.name}: {result.what}")
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                console.print(f"{name}: {held} of {count} held so far")
    finally:  # also if it is interrupted
        console.print(f"{name}: {held} of {count} held")
    return count - held


if __name__ == "__main__":
    sys.exit(main())
