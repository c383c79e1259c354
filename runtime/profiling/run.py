"""Works through a list of tasks: skips what is known, keeps to a budget, stores what is done."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Protocol, TypeVar

import torch

from meshwright.ir.graph import Graph
from meshwright.ir.profile import BlockRecord, Machine, OpRecord, OptimizerRecord, Timing
from meshwright.ir.profile_store import ProfileStore
from meshwright.runtime.profiling.blocks import measure_block, merged
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

Record = BlockRecord | OpRecord | OptimizerRecord
R = TypeVar("R")


class Shown(Protocol):
    """Where progress is shown."""

    def update(self, done: int, total: int, current: str) -> None: ...


@dataclass
class Outcome:
    """What became of a list of tasks."""

    measured: int = 0
    known: int = 0
    """Skipped, since the file has them."""
    left: int = 0
    """The budget did not allow them."""
    failed: list[str] = field(default_factory=list)


class Measurer(Protocol):
    """Who measures a task."""

    def measure(self, task: int, budget_s: float) -> list[Any]: ...


@dataclass(frozen=True, eq=False)
class Here:
    """This process alone: a GPU that nothing shares."""

    work: Work

    def measure(self, task: int, budget_s: float) -> list[Any]:
        try:
            return [self.work(task, budget_s, bool)]
        except FAILURES as error:
            raise Failed(f"{type(error).__name__}: {error}") from error


def measurer(
    graph: Graph | None, tasks: Sequence[Task], device: torch.device, processes: int
) -> AbstractContextManager[Measurer]:
    """On a CPU, processes that measure each task together; on a GPU this process."""

    work = work_on(graph, tasks, device, processes)
    return nullcontext(Here(work)) if device.type == "cuda" else Team(processes, work)


def work_on(
    graph: Graph | None, tasks: Sequence[Task], device: torch.device, processes: int
) -> Work:
    """What a process does with the number of a task."""

    def work(number: int, budget_s: float, agree: Callable[[bool], bool]) -> Record:
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
) -> Outcome:
    """Measures the tasks in order; `deadline` is of `time.monotonic`."""
    outcome = Outcome()
    for number, task in enumerate(tasks):
        if shown:
            shown.update(number, len(tasks), describe(task))
        if store.has(machine, *task.identity):
            outcome.known += 1
        else:
            _measure_one(number, task, by, store, machine, deadline, len(tasks), outcome)
    if shown:
        shown.update(len(tasks), len(tasks), "")
    return outcome


def _measure_one(
    number: int,
    task: Task,
    by: Measurer,
    store: ProfileStore,
    machine: Machine,
    deadline: float,
    total: int,
    outcome: Outcome,
) -> None:
    share_s = seconds_for(task, deadline, total - number)
    if share_s is None:
        outcome.left += 1
        return
    try:
        records = by.measure(number, share_s)
    except Failed as error:
        outcome.failed.append(f"{describe(task)}: {error}")
        return
    store.add(machine, together(records))
    outcome.measured += 1


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
