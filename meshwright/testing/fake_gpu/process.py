"""Runs jobs on a fake GPU in processes of their own: torch has to be told of it when it loads."""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.world.children import die_with_parent
from meshwright.testing.apart_libraries import reach_apart

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
Planned = Mapping[str, tuple[Plan, Graph]]
STEPS = 2
"""Of a job: the first makes what all others use."""
LOOKS = 4
"""How often they look back at a step, once it is over: its end, its loss twice, and the norm of
gradients."""


@dataclass(frozen=True)
class Task:
    """A few steps of one rank of a job."""

    plan: Plan
    graph: Graph
    rank: int
    count: int
    careless: bool = False
    """Whether the loop does what waits."""


@dataclass(frozen=True)
class Calls:
    """What the host calls in the last of the steps."""

    operators: int = 0
    """Of torch, forward and backward, views and what makes memory among them."""
    launches: int = 0
    """Those that the device has to do something for."""
    messages: int = 0
    """Collectives and messages among them."""


@dataclass(frozen=True)
class Seen:
    """Of a few steps of a job."""

    waits: Sequence[str] = ()
    """What the host would wait for in the step itself."""
    looks: int = 0
    """How often it looks back at the step before."""
    races: Sequence[str] = ()
    """What two streams, or one and the host, do to one memory in no order."""
    late: Sequence[str] = ()
    """Memory that is free when the host next looks, not as soon as it goes back."""
    mixed: Sequence[str] = ()
    """Operators other than copies with operands of the host and of the device, and places of
    emitted code that make tensors of the host."""
    calls: Calls = Calls()
    failed: str = ""
    """Why the steps did not come to their end; "" if they did."""


def why_not() -> str:
    """Why there can be none here; "" if there can."""
    if torch.version.cuda is not None:
        return "this build of torch has CUDA: the guard is for builds without"
    return "" if which("g++") else "there is no g++ to make the guard with"


@cache
def guard() -> Path:
    """The library that is loaded ahead of torch, made once in a process: in 2 s."""
    made = Path(mkdtemp()) / "guard.so"
    link = [f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib"]
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH}/include", str(HERE / "guard.cpp"),
         *link, "-o", str(made)],
        check=True,
    )  # fmt: skip
    return made


def each_seen(tasks: Mapping[str, Task], limit_s: float = 120.0) -> Iterator[tuple[str, Seen]]:
    """By name, what is seen of each task, as soon as it ends. One process loads torch, and is
    forked for each: a task that fails, dies or takes longer than `limit_s` says so and stops no
    other."""
    with TemporaryDirectory() as folder:
        given = Path(folder) / "tasks.pickle"
        given.write_bytes(pickle.dumps((dict(tasks), limit_s)))
        reader, writer = os.pipe()
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(given), str(writer)],
            cwd=HERE.parents[2], pass_fds=[writer],
            env={**os.environ, "LD_PRELOAD": str(guard())},
        )  # fmt: skip
        os.close(writer)
        left = dict.fromkeys(tasks)
        try:
            with os.fdopen(reader, "rb") as said:
                for line in said:
                    name, found = json.loads(line)
                    del left[name]
                    yield name, seen_of(found)
        finally:
            server.kill()
            server.wait()
    for name in left:
        yield name, Seen(failed="the process that was to be forked for it died")


def seen_of(found: Mapping[str, Any]) -> Seen:
    """Returns what was seen, as JSON has it."""
    lists = {key: tuple(x) for key, x in found.items() if isinstance(x, list)}
    return Seen(**{**found, **lists, "calls": Calls(**found["calls"])})


def waits_of(
    planned: Planned, count: int, *, careless: str = "", limit_s: float = 300.0
) -> dict[str, Seen]:
    """By name, what is seen in `count` steps of the last rank of each job. `careless`: the one
    whose loop does what waits."""
    tasks = {
        name: Task(plan, graph, plan.world_size - 1, count, name == careless)
        for name, (plan, graph) in planned.items()
    }
    return dict(each_seen(tasks, limit_s))


def _run(task: Task, answers: Connection) -> None:
    from meshwright.testing.fake_gpu.job import steps

    die_with_parent()
    try:
        found = steps(task.plan, task.graph, task.rank, task.count, careless=task.careless)
    except BaseException:
        answers.send(Seen(failed=traceback.format_exc()))
        raise
    answers.send(found)


def _forked(task: Task, limit_s: float) -> Seen:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(task, writer), daemon=True)
    process.start()
    writer.close()
    try:
        if not reader.poll(limit_s):
            return Seen(failed=f"it had not ended after {limit_s:g} s")
        found: Seen = reader.recv()
        return found
    except EOFError:
        process.join()
        return Seen(failed=f"its process died with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _main(given: Path, answers: int) -> None:
    import meshwright.testing.fake_gpu.job  # noqa: F401 (loaded once, ahead of all forks)

    die_with_parent()
    reach_apart()  # products of 8-bit floats are those of a library
    tasks, limit_s = pickle.loads(given.read_bytes())
    with os.fdopen(answers, "w") as said:
        for name, task in tasks.items():
            said.write(json.dumps([name, asdict(_forked(task, limit_s))]) + "\n")
            said.flush()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
