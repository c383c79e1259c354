"""Runs steps one after the other, each in a process of its own that cannot harm the rest.

The runner loads what steps import and forks: a step begins at once, and has modules, but no device,
in common with the others. It is killed, with all that it started, at its limit of time, memory or
output; what it has found by then stays.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.gpu.child import DONE, FAILED, become
from benchmarks.gpu.results import LOG, DayRun, Result, Status, save
from benchmarks.gpu.step import Place, Step, Value
from meshwright.runtime.world.children import children_now, end_orphans, orphans_come_here

_POLL_S = 0.05
_START_S = 15.0
"""That a Python of its own takes a step more: to load what it imports."""
_GOING_S = 10.0
"""That a step has to be gone once it is killed."""
_LOOK_S = 0.5
"""Between two looks at a step's memory."""
_MEMORY_SHARE = 0.8
"""Of the machine's, for a step that states no limit of its own."""
_MOST_OUTPUT = 2**26
_KEPT_OUTPUT = 2**17
"""Bytes of a step's output that stay in the log: its end."""
_NO_FORK = 100
"""Added to the number of GPUs by a fork that cannot use them."""
Told = Callable[[Result], None]


@dataclass(frozen=True, slots=True)
class Devices:
    """What this machine has."""

    gpus: int
    forks: bool
    """Whether a fork of the runner can use them: not if something that was loaded has begun to use
    CUDA already."""


def warm(modules: Sequence[str]) -> None:
    """Loads what steps share. What cannot be loaded fails again in the steps that need it."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc(limit=1)


def find_devices() -> Devices:
    """Tries the GPUs, if there are any, in a fork: the runner itself never touches CUDA."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            import torch

            code = min(torch.cuda.device_count(), _NO_FORK - 1)
            if code:
                code += _NO_FORK
                torch.zeros(1, device="cuda")
                code -= _NO_FORK
        except Exception:
            traceback.print_exc(limit=1)
        finally:
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Devices(max(code, 0) % _NO_FORK, 0 <= code < _NO_FORK)


def run_steps(
    steps: Sequence[Step], place: Place, run: DayRun, devices: Devices, begun: float, told: Told
) -> DayRun:
    """Runs all, within the run's budget from `begun` on; results are saved after each.

    `place` is that of all, without a deadline.
    """
    (place.out / LOG).write_bytes(b"")
    save(run, place.out)
    for step in steps:
        left = run.budget_s - (time.monotonic() - begun)
        result = _left_out(step, left, devices.gpus, place.rehearsal) or run_one(
            step, place, left, anew=not devices.forks
        )
        run = replace(run, results=(*run.results, result))
        save(run, place.out)
        told(result)
    return run


def _left_out(step: Step, left_s: float, gpus: int, rehearsal: bool) -> Result | None:
    """Why a step does not run; None if it does."""
    why = ""
    if gpus < step.gpus and not rehearsal:
        why = f"it needs {step.gpus} GPUs, the machine has {gpus}"
    elif left_s < step.least_s:
        why = f"{max(0.0, left_s):.0f} s were left, it needs {step.least_s:.0f}"
    return Result(step=step.name, status="left out", why=why) if why else None


def run_one(step: Step, place: Place, left_s: float, *, anew: bool = False) -> Result:
    """Runs one step to its end or its limit, the smaller of its own and `left_s`; `anew`: in a
    Python of its own."""
    limit = min(step.limit_s + (_START_S if anew else 0.0), left_s)
    facts, log = place.out / "now.jsonl", place.out / "now.log"
    facts.write_bytes(b"")
    log.write_bytes(b"")
    begun = time.monotonic()
    ours, cpu_s = children_now(), list[float]()
    with orphans_come_here():
        pid = os.fork()
        if pid == 0:
            become(step, replace(place, until=begun + limit), facts, log, anew=anew)
        try:
            status, why = _watch(pid, begun + limit, step.most_bytes or _most_bytes(), log, cpu_s)
        finally:
            if gone := _kill(pid):
                end_orphans(ours)
    seconds = time.monotonic() - begun
    found, end, bad = _read(facts)
    if not status:
        status, why = _how_it_ended(end, why)
    elif status == "out of time":
        why = f"it was killed after {limit:.0f} s"
    if not gone:
        why = f"{why}; it could not be killed and may still hold the device".lstrip("; ")
    if bad:
        why = f"{why}; {bad} lines of facts could not be read".lstrip("; ")
    _keep_log(place.out / LOG, step.name, log)
    facts.unlink()
    log.unlink()
    return Result(step=step.name, status=status, why=why, seconds=round(seconds, 2),
                  limit_s=round(limit, 2), cpu_s=round(sum(cpu_s), 2), facts=found)  # fmt: skip


def _watch(
    pid: int, until: float, most_bytes: int, log: Path, cpu_s: list[float]
) -> tuple[Status | str, str]:
    """Waits for a process; ("", how it ended), and what it computed, if it ended by itself."""
    look = 0.0
    while True:
        done, code, used = os.wait4(pid, os.WNOHANG)
        if done:
            number = os.waitstatus_to_exitcode(code)
            cpu_s.append(used.ru_utime + used.ru_stime)
            return "", _signal_name(-number) if number < 0 else ""
        now = time.monotonic()
        if now > until:
            return "out of time", ""
        if now > look:
            look = now + _LOOK_S
            if (used := _tree_bytes(pid)) > most_bytes:
                return "out of memory", f"its processes held {used / 2**30:.1f} GiB"
            if log.stat().st_size > _MOST_OUTPUT:
                return "failed", f"it printed more than {_MOST_OUTPUT >> 20} MiB"
        time.sleep(_POLL_S)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(number).name}"
    return f"ended by signal {number}"


def _how_it_ended(end: Sequence[str], why: str) -> tuple[Status, str]:
    """Of a step that was not killed: its last line, or that it has none."""
    if why or not end:
        return "died", why or "it left without saying how it ended"
    return ("done", "") if end[0] == DONE else ("failed", end[1])


def _tree_bytes(pid: int) -> int:
    """Memory of a process and all below it."""
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _most_bytes() -> int:
    return int(_MEMORY_SHARE * psutil.virtual_memory().total)


def _kill(pid: int) -> bool:
    """Kills a step's process group and waits for the step; False if it does not go, as when the
    driver holds it: then the next step begins all the same."""
    until = time.monotonic() + _GOING_S
    while time.monotonic() < until:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        time.sleep(_POLL_S)
    return False


def _lines(path: Path) -> Iterator[list[object] | None]:
    """Each line of a step's file; None for one that is no list, as the last may be half."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in filter(None, text.split("\n")):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        yield found if isinstance(found, list) and found else None


def _read(path: Path) -> tuple[dict[str, Value], list[str], int]:
    """Facts, the line that says how it ended, if any, and the number of lines that are neither."""
    facts: dict[str, Value] = {}
    end: list[str] = []
    bad = 0
    for line in _lines(path):
        match line:
            case ["fact", str(key), bool() | int() | float() | str() | None as value]:
                facts[key] = value
            case [word] if word == DONE:
                end = [DONE]
            case [word, str(why)] if word == FAILED:
                end = [FAILED, why]
            case _:
                bad += 1
    return facts, end, bad


def _keep_log(path: Path, name: str, log: Path) -> None:
    """Appends the end of a step's output to the log of all."""
    with log.open("rb") as file, path.open("ab") as kept:
        file.seek(max(0, log.stat().st_size - _KEPT_OUTPUT))
        kept.write(f"\n===== {name}\n".encode() + file.read())
