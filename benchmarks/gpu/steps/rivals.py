"""DDP, FSDP2 and torch's pipelining beside jobs of ours; with two GPUs or more."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator

from benchmarks.gpu.claim import Claim, fact, fixed
from benchmarks.gpu.step import Fact, Place, Step

PROGRAM = "benchmarks.vs_torch"
_LINE = re.compile(
    r"^(?P<ranks>\d+) ranks\s+(?P<name>\w[\w ]*?\w)\s+meshwright\s+(?P<ours>[\d.]+) tokens/s\s+"
    r"torch\s+(?P<torch>[\d.]+) tokens/s\s+ratio (?P<ratio>[\d.]+)", re.MULTILINE,
)  # fmt: skip
OPTIONS = ("--ranks", "--pairs")
PAIRS = "12"
RANKS = (2, 4)
"""Where there are as many GPUs."""
PAGE = "results/vs_torch.md"
RIVALS = ("DDP", "FSDP2", "torch pipelining 1F1B")


def run(place: Place) -> Iterator[Fact]:
    """Yields tokens per second of both, and the ratio, per rival."""
    if place.rehearsal:
        yield from _rehearsed()
        return
    import torch

    ranks, pairs = OPTIONS
    sizes = [str(size) for size in RANKS if size <= torch.cuda.device_count()]
    command = [sys.executable, "-m", PROGRAM, ranks, *sizes, pairs, PAIRS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            print(line, end="", flush=True)
            yield from read(line)
    if program.returncode:
        raise RuntimeError(f"{PROGRAM} ended with {program.returncode}: the log says why")


def _rehearsed() -> Iterator[Fact]:
    """The program takes minutes, so only its options are asked for, which imports all that it
    needs; what is read is its print of steps that nobody took."""
    from benchmarks.vs_torch import Took, line

    helped = _help()
    if missing := [option for option in OPTIONS if option not in helped]:
        raise RuntimeError(f"{PROGRAM} has no {missing[0]}; it has: {helped}")
    yield "rehearsed", "the program started, and its print is read"
    untaken = [(Took(1.0, 1.0, 0.0), Took(1.0, 1.0, 0.0))]
    yield from read("\n".join(line(name, size, untaken) for size in RANKS for name in RIVALS))


def _help() -> str:
    """What the program prints of its options, started as a program in this process: a step has one
    of its own."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [PROGRAM, "--help"]
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it was imported before
            runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{PROGRAM} --help ended with {end.code}") from end
    finally:
        sys.argv = before
    return printed.getvalue()


def read(printed: str) -> Iterator[Fact]:
    """Yields the facts of what the program printed."""
    for match in _LINE.finditer(printed):
        row = _row(match["name"], int(match["ranks"]))
        yield f"{row}/ours_tokens_per_s", float(match["ours"])
        yield f"{row}/torch_tokens_per_s", float(match["torch"])
        yield f"{row}/ratio", float(match["ratio"])


def _row(name: str, ranks: int) -> str:
    return f"{name} on {ranks}"


STEP = Step(
    name="rivals", does="torch's own engines beside jobs of ours", order=54, limit_s=110,
    least_s=40, gpus=2, run=run,
    claims=tuple(
        Claim(
            text=f"{ranks} GPUs: a job is as fast as {name} or faster", page=PAGE,
            low=fixed(1.0), high=fixed(9.0),
            measured=fact(f"{_row(name, ranks)}/ratio"),
        )
        for ranks in RANKS for name in RIVALS
    ),
)  # fmt: skip
