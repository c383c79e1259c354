"""Plans of GPUs on a GPU that is not there: what a step waits for, races, mixed devices, calls.

    python -m benchmarks.fake_cuda [--only PATTERN ...] [--part 1/4] [--limit 120]
        [--done FOLDER] [--out docs/results/fake_cuda.md]

Runs every plan that is to equal one process, for GPT-2 and Llama with the models' own operators and
with all kernels, then forms, stores, retentions, optimizers, precisions, schedules, overlaps and
meshes; two steps of each kind of rank, each in a process with its own limit of time (`--limit`, in
seconds). What was found lies in `--done` as it is found, so that a run that was broken off goes on;
what is there is not run again. `--only`: names that contain a text or match a pattern of the
shell's, in the order of these. `--part`: each fourth of them from the first on. With `--out` the
page is written, of all that is there. Exits with 1 if a plan failed, or shows what is not to be.
"""

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.fake_cuda.page import page
from benchmarks.fake_cuda.plans import Entry, entries
from benchmarks.fake_cuda.run import kept, run


def picked(only: Sequence[str], part: tuple[int, int]) -> tuple[Entry, ...]:
    """The plans that are asked for."""
    known = entries()
    wanted = [x for text in only for x in known if _fits(x.name, text)]
    found = tuple(dict.fromkeys(wanted)) if only else known
    number, of = part
    return tuple(found[number - 1 :: of])


def _part(text: str) -> tuple[int, int]:
    """Which part, and of how many."""
    number, of = map(int, text.split("/"))
    if not 1 <= number <= of:
        raise argparse.ArgumentTypeError(f"{text}: of four parts the first is 1/4, the last 4/4")
    return number, of


def _fits(name: str, text: str) -> bool:
    return text in name or fnmatchcase(name, text)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="1/4")
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--done", type=Path, default=Path("fake_cuda"))
    parser.add_argument("--out", type=Path)
    told = parser.parse_args()
    asked = picked(told.only, told.part)
    told.done.mkdir(parents=True, exist_ok=True)
    run(asked, told.done, told.limit)
    found = kept(told.done, asked)
    if told.out:
        told.out.write_text(page(kept(told.done, entries())))
    return int(any(result.faults for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
