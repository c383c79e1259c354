"""Runs the plans of a contest: all of them once, then those in front again and again, in turns,
until it is known whether the one kept is within the bar of each of them."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import hypot
from pathlib import Path
from statistics import mean, median, stdev

from benchmarks.accuracy.measure import Effort, Trial, run_plan
from benchmarks.accuracy.models import Subject
from benchmarks.fastest.plans import Entrant
from meshwright.ir.graph.graph import Graph
from meshwright.running.disturbance import pace_s

HEAT = Effort(warmup=2, steps=2, tracked=False)
FINAL = Effort(warmup=2, steps=5, tracked=False)
"""Of the first run of every plan, and of those that follow."""
CLOSE = 1.1
"""In front is who is within this factor of the best."""
TURNS, MOST = 3, 9
"""Final runs of a plan: so many at least and at most."""
BAR = 1.05
"""The kept plan may take so much longer than the fastest."""
SURE = 2.0
"""A rival is run on until the kept plan's time over its own is so many standard errors from the
bar, below or above."""
LOOKS = 7
ORDER_SEED = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of the plan with this number."""

    number: int
    turn: int
    steps_s: tuple[float, ...]
    """Of the slowest rank in each step."""


def run_contest(
    subject: Subject, graph: Graph, entrants: Sequence[Entrant], folder: Path
) -> list[Ran]:
    """Goes on where a run before has stopped."""
    path = folder / "runs.json"
    found = read(path)
    usual_s = _usual_s(folder / "pace.txt")
    turn, numbers = 0, list(range(len(entrants)))
    while numbers:
        random.Random(ORDER_SEED + turn).shuffle(numbers)
        for number in numbers:
            if any((ran.number, ran.turn) == (number, turn) for ran in found):
                continue
            ran = run_plan(
                Trial(
                    subject=subject, name="", graph=graph, plan=entrants[number].plan,
                    folder=folder / "run", turn=turn, effort=FINAL if turn else HEAT,
                    usual_s=usual_s,
                )
            )  # fmt: skip
            steps = tuple(max(each) for each in zip(*ran.steps_s, strict=True))
            found.append(Ran(number, turn, steps))
            path.write_text(json.dumps([asdict(ran) for ran in found]))
            _tell(turn, entrants[number], median(steps))
        turn += 1
        numbers = next_up([ran for ran in found if ran.turn < turn])
    return found


def _usual_s(path: Path) -> float:
    """The machine's pace at the contest's start, the middle of a few looks: all are told at it."""
    if not path.exists():
        path.write_text(str(median(pace_s() for _ in range(LOOKS))))
    return float(path.read_text())


def _tell(turn: int, entrant: Entrant, seconds: float) -> None:
    print(
        f"  {turn} {entrant.origin:6} {entrant.predicted_s:7.3f} {seconds:7.3f} s  {entrant.name}",
        flush=True,
    )


def read(path: Path) -> list[Ran]:
    """What has been run so far."""
    if not path.exists():
        return []
    return [Ran(r["number"], r["turn"], tuple(r["steps_s"])) for r in json.loads(path.read_text())]


def next_up(found: Sequence[Ran]) -> list[int]:
    """Who runs in the next turn: those in front that have too few final runs, then those that may
    be beyond the bar, each beside the kept plan; none once all is known."""
    runs = Counter(ran.number for ran in found if ran.turn)
    numbers = [number for number in in_front(found) if runs[number] < TURNS]
    if not numbers:
        numbers = [number for number in undecided(found) if number and runs[number] < MOST]
    return sorted({0, *numbers}) if numbers else []


def in_front(found: Sequence[Ran]) -> list[int]:
    """The kept plan, the first, and those close to the best, by all that is known of them: the one
    short run of the heat may have been off, the best one's too."""
    known = {number: measured_s(found, number) for number in {ran.number for ran in found}}
    limit_s = CLOSE * min(known.values())
    return sorted({0, *(number for number, seconds in known.items() if seconds <= limit_s)})


def measured_s(found: Sequence[Ran], number: int) -> float:
    """The median of the final runs' steps; of the heat for a plan that was left behind."""
    own = [ran for ran in found if ran.number == number]
    final = [s for ran in own if ran.turn for s in ran.steps_s]
    return median(final or [s for ran in own for s in ran.steps_s])


def undecided(found: Sequence[Ran]) -> list[int]:
    """The kept plan and the rivals of which it is not known whether it is within the bar of them;
    none once one is known to be faster by more, or all are known not to be."""
    rivals = sorted(set(in_front(found)) - {0})
    margins = {number: _margin(found, number) for number in rivals}
    left = [number for number in rivals if abs(margins[number]) < SURE]
    return [0, *left] if left and max(margins.values()) < SURE else []


def _margin(found: Sequence[Ran], number: int) -> float:
    """By how many standard errors the kept plan's time over this one's is beyond the bar."""
    error = hypot(_error(found, 0), _error(found, number))
    return (measured_s(found, 0) / measured_s(found, number) / BAR - 1) / max(error, 1e-9)


def _error(found: Sequence[Ran], number: int) -> float:
    """Of the mean over final runs, relative to it."""
    runs = [median(ran.steps_s) for ran in found if ran.turn and ran.number == number]
    return stdev(runs) / len(runs) ** 0.5 / mean(runs)


def noise(found: Sequence[Ran]) -> float:
    """By how much the medians of final runs of one plan differ, relative to the lower: the median
    over plans."""
    medians: dict[int, list[float]] = {}
    for ran in found:
        if ran.turn:
            medians.setdefault(ran.number, []).append(median(ran.steps_s))
    return median(max(runs) / min(runs) - 1 for runs in medians.values())
