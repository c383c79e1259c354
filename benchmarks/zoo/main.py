"""Trains every model of the zoo under several plans, against plain PyTorch.

`python -m benchmarks.zoo [--only NAME ...] [-o FILE]`
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.zoo.page import page
from benchmarks.zoo.plain import PLAIN
from benchmarks.zoo.run import Tried, attempt
from benchmarks.zoo.senses import AUDIO, MULTIMODAL, VISION
from benchmarks.zoo.text import DECODERS, ENCODERS, EXPERTS, STATE_SPACE, TRANSLATORS

ENTRIES = {
    entry.name: entry
    for entry in (
        *DECODERS, *EXPERTS, *ENCODERS, *TRANSLATORS, *STATE_SPACE, *VISION, *AUDIO, *MULTIMODAL,
        *PLAIN,
    )
}  # fmt: skip

COMMAND = (
    "`python -m benchmarks.zoo -o FREE`, the same with `--pin pp=1 --pin tp=2 -o PINNED`, "
    "then `python -m benchmarks.zoo --only -o FREE --beside PINNED --page PAGE`"
)


def _read(file: Path) -> list[Tried]:
    """The last line of each model, in the order of the zoo."""
    last = {found["name"]: found for found in map(json.loads, file.read_text().splitlines())}
    return [Tried(**last[name]) for name in ENTRIES if name in last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(ENTRIES), metavar="NAME")
    parser.add_argument("-o", "--out", type=Path, help="one line of JSON per model")
    parser.add_argument("--pin", action="append", default=[], help="a constraint of the search")
    parser.add_argument("--beside", type=Path, help="the lines of the run that was pinned")
    parser.add_argument("--page", type=Path, help="write the page from --out and --beside")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only:
        tried = attempt(ENTRIES[name], constraints=tuple(args.pin))
        print(f"{'ok  ' if tried.passed else 'FAIL'} {tried}", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(asdict(tried)) + "\n")
    if args.page and args.out and args.beside:
        args.page.write_text(page(_read(args.out), _read(args.beside), COMMAND, len(ENTRIES)))
