"""All steps at tiny sizes on a CPU, two at a time: the day is not for the steps' own bugs.

A rehearsal measures nothing. Limits of time are wide, as machines that rehearse are shared.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu.results import LOG, DayRun, Result, load, save
from benchmarks.gpu.runner import Devices, Told, run_steps
from benchmarks.gpu.step import BUDGET_S, Place, Step
from meshwright.runtime.world.children import die_with_parent

LANES = 2
SLACK = 4.0
"""Times the limit of a step, and of all."""


def rehearse(
    steps: Sequence[Step], place: Place, run: DayRun, devices: Devices, told: Told
) -> DayRun:
    """Runs all; what steps leave behind is in `place.out`, as if they had run one by one."""
    wide = [replace(step, limit_s=min(BUDGET_S, SLACK * step.limit_s)) for step in steps]
    run = replace(run, budget_s=SLACK * run.budget_s)
    parts = lanes(wide)
    folders = [place.out / f"lane{number}" for number in range(len(parts))]
    pids = []
    for part, folder in zip(parts, folders, strict=True):
        folder.mkdir(exist_ok=True)
        pids.append(_fork(part, replace(place, out=folder), run, devices, told))
    for pid in pids:
        os.waitpid(pid, 0)
    results = {result.step: result for folder in folders for result in load(folder).results}
    lost = Result(step="", status="died", why="its lane ended before it")
    run = replace(run, results=tuple(
        results.get(step.name, replace(lost, step=step.name)) for step in steps
    ))  # fmt: skip
    with (place.out / LOG).open("wb") as log:
        for folder in folders:
            log.write((folder / LOG).read_bytes())
            for path in folder.iterdir():
                if path.name != LOG:
                    path.replace(place.out / path.name)
            shutil.rmtree(folder)
    save(run, place.out)
    return run


def lanes(steps: Sequence[Step]) -> list[list[Step]]:
    """Parts that take about as long; a step is behind those that it reads from."""
    groups: list[list[Step]] = []
    for step in steps:
        own = [group for group in groups if any(one.name in step.reads for one in group)]
        groups = [group for group in groups if group not in own]
        groups.append([*(one for group in own for one in group), step])
    found: list[list[Step]] = [[] for _ in range(LANES)]
    for group in sorted(groups, key=_limit_s, reverse=True):
        min(found, key=_limit_s).extend(group)
    return [lane for lane in found if lane]


def _limit_s(steps: Sequence[Step]) -> float:
    return sum(step.limit_s for step in steps)


def _fork(steps: Sequence[Step], place: Place, run: DayRun, devices: Devices, told: Told) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            run_steps(steps, place, run, devices, time.monotonic(), told)
        finally:
            os._exit(0)
    return pid
