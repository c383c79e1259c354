"""Works through a list of tasks: skips what is known, keeps to a budget, stores what is done, and
does again what was done while the machine was slow."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch

from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import BlockRecord, Machine, OpRecord, OptimizerRecord, Timing
from meshwright.ir.profile.profile_store import ProfileStore
from meshwright.runtime.profiling.blocks import measure_block, merged
from meshwright.runtime.profiling.load import BusyLoad
from meshwright.runtime.profiling.ops import measure_op
from meshwright.runtime.profiling.optimizers import measure_optimizer
from meshwright.runtime.profiling.tasks import BlockTask, OpTask, Task
from meshwright.runtime.profiling.team import FAILURES, Failed, Team, Work
from meshwright.runtime.profiling.timings import mean

_SHARES = {BlockTask: 0.2, OpTask: 0.05}
"""Seconds that a task gets if there is no budget: more than it needs where tensors are small."""
_SHARE = 0.2
_LEAST_SHARE = 0.02
"""Of these seconds, however tight the budget."""

_STEADY, _AGAIN = 1.05, 2
"""What was measured at a pace slower than usual by this factor is measured again, so often at most.
Virtual machines share their hosts with strangers, who slow them for seconds or minutes."""
_PACE = -1
"""In place of a task's number: how fast are you now?"""

Record = BlockRecord | OpRecord | OptimizerRecord
R = TypeVar("R")


class Shown(Protocol):
    """Where progress is shown."""

    def update(self, done: int, total: int, current: str) -> None: ...


@dataclass
class TaskOutcome:
    """What became of a list of tasks."""

    measured: int = 0
    known: int = 0
    """Skipped, since the file has them."""
    left: int = 0
    """The budget did not allow them."""
    again: int = 0
    """Measured once more, at a better pace of the machine."""
    failed: list[str] = field(default_factory=list)


class Measurer(Protocol):
    """Who measures a task."""

    def measure(self, task: int, budget_s: float) -> list[Any]: ...

    def pace_s(self) -> float:
        """What fixed work takes now; always the same where nobody else uses the device."""


@dataclass(frozen=True, eq=False)
class Together:
    """Processes that have a core each."""

    team: Team

    def measure(self, task: int, budget_s: float) -> list[Any]:
        return self.team.measure(task, budget_s)

    def pace_s(self) -> float:
        """Of the slowest."""
        return float(max(self.team.measure(_PACE, 0.0)))


@dataclass(frozen=True, eq=False)
class Here:
    """This process alone: a GPU that nothing shares."""

    work: Work

    def measure(self, task: int, budget_s: float) -> list[Any]:
        try:
            return [self.work(task, budget_s, bool)]
        except FAILURES as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def pace_s(self) -> float:
        return 1.0


@contextmanager
def measurer(
    graph: Graph | None, tasks: Sequence[Task], device: torch.device, processes: int
) -> Iterator[Measurer]:
    """On a CPU, processes that measure each task together; on a GPU this process."""
    work = work_on(graph, tasks, device, processes)
    if device.type == "cuda":
        yield Here(work)
        return
    with Team(processes, work) as team:
        yield Together(team)


def work_on(
    graph: Graph | None, tasks: Sequence[Task], device: torch.device, processes: int
) -> Work:
    """What a process does with the number of a task."""

    loads: list[BusyLoad] = []

    def work(number: int, budget_s: float, agree: Callable[[bool], bool]) -> Record | float:
        if number == _PACE:
            loads.extend(() if loads else [BusyLoad(device)])
            agree(True)
            return loads[0].unit_s()
        return _measured(graph, tasks[number], device, budget_s, processes, agree)

    return work


def seconds_for(task: Task, deadline: float, left: int) -> float | None:
    """The time for one of `left` tasks; None if there is none."""
    fair = (deadline - monotonic()) / left
    usual = _SHARES.get(type(task), _SHARE)
    return min(usual, max(fair, _LEAST_SHARE * usual)) if fair > 0 else None


def _measured(
    graph: Graph | None,
    task: Task,
    device: torch.device,
    budget_s: float,
    processes: int,
    agree: Callable[[bool], bool],
) -> Record:
    if isinstance(task, BlockTask):
        assert graph is not None
        return measure_block(
            graph, task, device, budget_s=budget_s, processes=processes, agree=agree
        )
    if isinstance(task, OpTask):
        return measure_op(task, device, budget_s=budget_s, agree=agree)
    return measure_optimizer(task, device, budget_s=budget_s, agree=agree)


def measure_all(
    tasks: Sequence[Task],
    by: Measurer,
    store: ProfileStore,
    machine: Machine,
    *,
    deadline: float = float("inf"),
    shown: Shown | None = None,
) -> TaskOutcome:
    """Measures the tasks in order; `deadline` is of `time.monotonic`."""
    outcome = TaskOutcome()
    paces = Paces(by)
    for number, task in enumerate(tasks):
        if shown:
            shown.update(number, len(tasks), describe(task))
        if store.has(machine, *task.identity):
            outcome.known += 1
            continue
        share_s = seconds_for(task, deadline, len(tasks) - number)
        if share_s is None:
            outcome.left += 1
            continue
        try:
            records, pace = paces.measured(number, share_s)
        except Failed as error:
            outcome.failed.append(f"{describe(task)}: {error}")
            continue
        store.add(machine, together(records))
        paces.of[number] = pace
        outcome.measured += 1
    for _ in range(_AGAIN):
        _measure_slow_again(tasks, paces, store, machine, deadline, outcome)
    if shown:
        shown.update(len(tasks), len(tasks), "")
    return outcome


def _measure_slow_again(
    tasks: Sequence[Task],
    paces: "Paces",
    store: ProfileStore,
    machine: Machine,
    deadline: float,
    outcome: TaskOutcome,
) -> None:
    slow = paces.slow()
    for place, number in enumerate(slow):
        share_s = seconds_for(tasks[number], deadline, len(slow) - place)
        if share_s is None:
            return
        try:
            records, pace = paces.measured(number, share_s)
        except Failed:  # it has been measured once
            continue
        if pace < paces.of[number]:
            store.add(machine, together(records))
            paces.of[number] = pace
            outcome.again += 1


class Paces:
    """Measures tasks, and what the machine's pace was meanwhile."""

    def __init__(self, by: Measurer) -> None:
        self._by = by
        self._last: float | None = None
        self.of: dict[int, float] = {}
        """By number of task, of the measurement that is kept."""

    def measured(self, number: int, budget_s: float) -> tuple[list[Any], float]:
        """What is measured, and the slower of the paces before and after."""
        before = self._last or self._by.pace_s()
        self._last = None
        records = self._by.measure(number, budget_s)
        self._last = self._by.pace_s()
        return records, max(before, self._last)

    def slow(self) -> list[int]:
        """Those that were measured at less than the usual pace."""
        usual = median(self.of.values()) if self.of else 0.0
        return [number for number, pace in self.of.items() if pace > _STEADY * usual]


def describe(task: Task) -> str:
    """For people."""
    if isinstance(task, BlockTask):
        mesh = "".join(f", {axis} {size}" for axis, size in task.model)
        made = ", compiled" if task.compiled else ""
        return f"{task.pattern}, {task.samples} samples{mesh}{made}"
    if isinstance(task, OpTask):
        shapes = " ".join("x".join(map(str, o.shape)) for o in task.operands)
        return f"{task.target} {shapes} {task.dtype}"
    return f"{task.optimizer}, {task.num_tensors} tensors, {task.nbytes / 2**20:g} MiB"


def together(records: Sequence[Record]) -> Record:
    """One record of what several processes say of the same task."""
    first = records[0]
    if isinstance(first, BlockRecord):
        return merged([r for r in records if isinstance(r, BlockRecord)])
    if isinstance(first, OptimizerRecord):
        return replace(first, time=mean([r.time for r in _of(OptimizerRecord, records)]))
    ops = list(_of(OpRecord, records))
    return replace(
        first,
        forward=mean([r.forward for r in ops]),
        backward=_mean_or_none([r.backward for r in ops]),
        backward_input=_mean_or_none([r.backward_input for r in ops]),
        backward_weight=_mean_or_none([r.backward_weight for r in ops]),
    )


def _of(kind: type[R], records: Sequence[Record]) -> Iterator[R]:
    return (r for r in records if isinstance(r, kind))


def _mean_or_none(timings: Sequence[Timing | None]) -> Timing | None:
    held = [t for t in timings if t is not None]
    return mean(held) if len(held) == len(timings) else None
