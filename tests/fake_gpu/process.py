"""Runs jobs on a fake GPU in a process of its own, as torch has to be told of it when it loads."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import which
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
Planned = Mapping[str, tuple[Plan, Graph]]


class Seen(NamedTuple):
    """Of a few steps of a job."""

    waits: list[str]
    """What the host would wait for in the step itself."""
    looks: int
    """How often it looks back at the step before."""
    races: Sequence[str] = ()
    """What two streams, or one and the host, do to one memory in no order."""
    late: Sequence[str] = ()
    """Memory that is free when the host next looks, not as soon as it goes back."""


def why_not() -> str:
    """Why there can be none here; "" if there can."""
    if torch.version.cuda is not None:
        return "this build of torch has CUDA: the guard is for builds without"
    return "" if which("g++") else "there is no g++ to make the guard with"


@cache
def _guard() -> Path:
    """The library that is loaded ahead of torch, made once in a process: in 2 s."""
    made = Path(mkdtemp()) / "guard.so"
    link = [f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib"]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH}/include", str(HERE / "guard.cpp"),
         *link, "-o", str(made)],
        check=True,
    )  # fmt: skip
    return made


def waits_of(
    planned: Planned, count: int, *, careless: str = "", timeout_s: float = 300.0
) -> dict[str, Seen]:
    """By name, what is seen in `count` steps of the last rank of each job. `careless`: the one
    whose loop does what waits."""
    given = {name: (*job, count, name == careless) for name, job in planned.items()}
    found: dict[str, tuple[Any, ...]] = beside_guard(_waits, given, timeout_s=timeout_s)
    return {name: Seen(*one) for name, one in found.items()}


def _waits(planned: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    from tests.fake_gpu.job import steps

    found = {}
    for name, (plan, graph, count, careless) in planned.items():
        waits = steps(plan, graph, plan.world_size - 1, count, careless=careless)
        found[name] = waits.found, waits.late, waits.streams.races, waits.streams.late
    return found


def beside_guard(function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> Any:
    """What the function returns in a process that can have fake GPUs."""
    folder = Path(mkdtemp())
    (folder / _GIVEN).write_bytes(pickle.dumps((function, args)))
    subprocess.run(
        [sys.executable, "-m", "tests.fake_gpu.process", str(folder)],
        check=True, timeout=timeout_s, cwd=HERE.parents[1],
        env={**os.environ, "LD_PRELOAD": str(_guard())},
    )  # fmt: skip
    return pickle.loads((folder / _RESULT).read_bytes())


_GIVEN, _RESULT = "given.pickle", "result.pickle"


def _main(folder: Path) -> None:
    function, args = pickle.loads((folder / _GIVEN).read_bytes())
    (folder / _RESULT).write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
