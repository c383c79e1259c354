"""Synthesised schedules against the schedule files: uneven stages, tight memory, split backwards.

python benchmarks/schedules.py [-o docs/results/schedules.md]

Times are in units of one mean forward, memory in micro-batches of one stage. A dash: the schedule
holds more than the cap.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import process_time

import ortools

from meshwright.costmodel.simulate.simulate import StageTimes
from meshwright.ir.plan.schedule import check_schedule
from meshwright.planner.problem.schedule_tools import (
    SCHEDULES,
    USUAL,
    recomputes_early,
    stages_per_rank,
    twin,
)
from meshwright.planner.synthesis.choose import files
from meshwright.planner.synthesis.solve import Synthesis, synthesise
from meshwright.planner.synthesis.task import Task, excess_bytes, step_s

ABOUT = f"""one core of a 2-core CPU, ortools {ortools.__version__}. Times are in units of one mean
forward, by the event simulator; memory in micro-batches of one stage, per rank. A dash: holds more
than the cap, or is for other placements. The bound holds for every legal schedule. Solve seconds
are processor time, taken while others were at work on the machine: less on an idle one."""
SIZES = ((4, 8), (8, 32))
"""Pipeline ranks and micro-batches."""


@dataclass(frozen=True)
class Stages:
    """How work is shared out over stages: forward, input half, weight half of each."""

    name: str
    weights: tuple[tuple[float, float, float], ...]
    extra: float = 0.0
    """What two halves take more than one whole backward, as a share of it."""
    send_s: float = 0.1

    def times(self) -> tuple[StageTimes, ...]:
        return tuple(
            StageTimes(
                forward_s=f, backward_s=(i + w) / (1 + self.extra), backward_input_s=i,
                backward_weight_s=w, send_s=self.send_s, saved_bytes=1,
            )
            for f, i, w in self.weights
        )  # fmt: skip


def profiles(num_stages: int) -> Iterator[Stages]:
    """Even stages, and ways in which real ones are not."""
    even = [(1.0, 1.0, 1.0)] * num_stages
    yield Stages("even", tuple(even))
    yield Stages("head: last stage 1.5x", (*even[1:], (1.5, 1.5, 1.5)))
    uneven = Random(0)
    yield Stages("uneven by up to 50 %", tuple(_near(uneven, 0.5) for _ in even))
    yield Stages("recomputed: backward 1.5x", ((1.0, 2.0, 1.0),) * num_stages)
    yield Stages("halves cost 10 %", tuple(_near(Random(1), 0.3) for _ in even), extra=0.1)
    yield Stages("slow links: send 1.0", tuple(even), send_s=1.0)


def _near(random: Random, spread: float) -> tuple[float, float, float]:
    scale = random.uniform(1 - spread, 1 + spread)
    return scale, scale * random.uniform(0.8, 1.2), scale * random.uniform(0.8, 1.2)


def caps(ranks: int, chunks: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Names and caps per rank."""
    yield "none", ()
    yield "first stage of 1F1B", (float(ranks * chunks),) * ranks
    if chunks == 1:
        yield "1F1B exactly", tuple(float(ranks - rank) for rank in range(ranks))
    yield "half of 1F1B", tuple(float(max(1, (ranks - r) // 2) * chunks) for r in range(ranks))


def tasks() -> Iterator[tuple[str, str, Task]]:
    """(stages, cap, task)."""
    for ranks, count in SIZES:
        for chunks in (1, 2):
            for stages in profiles(ranks * chunks):
                if chunks == 2 and not stages.name.startswith("uneven"):
                    continue
                placement = tuple(min(s, 2 * ranks - 1 - s) for s in range(ranks * chunks))
                task = Task(stages=stages.times(), placement=placement, num_microbatches=count)
                name = stages.name + (", two stages per rank in a V" if chunks == 2 else "")
                for cap, rooms in caps(ranks, chunks):
                    title = f"{ranks} x {count}, {name}"
                    yield title, cap, replace(task, capacity_bytes=rooms)


NAMES = tuple(
    n
    for n in SCHEDULES
    if (n == USUAL or not twin(n, USUAL))
    and not recomputes_early(n)
    and set(stages_per_rank(n)) & {1, 2}
)


def row(title: str, cap: str, task: Task) -> tuple[str, float, Synthesis]:
    """A line of the table, what the best file takes more, and what was found."""
    known = {one.name: one for one in files(task)}
    begin = process_time()
    found = synthesise(task, known.values())
    seconds = process_time() - begin
    check_schedule(found.schedule)
    assert not excess_bytes(task, found.schedule)
    taken = {n: step_s(task, s) for n, s in known.items() if not excess_bytes(task, s)}
    assert all(found.step_s <= other for other in taken.values())
    best = min(taken.values(), default=float("inf"))
    cells = " | ".join(f"{taken[n]:.1f}" if n in taken else "-" for n in NAMES)
    more = f"{best / found.step_s - 1:.1%}" if taken else "none fits"
    line = (
        f"| {title} | {cap} | {cells} | {found.step_s:.1f} | {found.bound_s:.1f} | "
        f"{found.gap:.1%} | {more} | {seconds:.1f} |"
    )
    return line, best / found.step_s - 1, found


def report() -> str:
    lines = [
        f"| ranks x micro-batches, stages | cap | {' | '.join(NAMES)} | synthesised | bound | "
        "gap | best file slower by | solve s |",
        "|" + "---|" * (len(NAMES) + 7),
    ]
    gains, proven, unfit = [], 0, 0
    for title, cap, task in tasks():
        line, gain, found = row(title, cap, task)
        print(line, flush=True)
        lines.append(line)
        proven += found.gap <= 1e-3
        unfit += gain == float("inf")
        if gain < float("inf"):
            gains.append(gain)
    gains.sort()
    count = len(lines) - 2
    summary = (
        f"{count} tasks. Of those that a file fits, the best file is slower by "
        f"{gains[len(gains) // 2]:.1%} in the middle and {gains[-1]:.1%} at most, never quicker. "
        f"{unfit} fit under no file. {proven} are proven to 0.1 %."
    )
    return "\n".join([summary, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--date", default="")
    options = parser.parse_args()
    run = "`python benchmarks/schedules.py`" + (f", {options.date}" if options.date else "")
    text = f"# Schedules by solver\n\n{run}, {ABOUT}\n\n{report()}\n"
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
