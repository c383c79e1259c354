"""Profiling under torchrun: every rank of the cluster takes part, rank 0 keeps the file.

CPU ranks measure the same task together; GPUs share nothing, so tasks are dealt to the ranks of
each type of device in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.ir.comm.by_store import from_first, of_all
from meshwright.ir.errors import MismatchError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import Machine, Profile
from meshwright.planner.problem.problem import Problem
from meshwright.profiling.run import ProfilingRun
from meshwright.runtime.profiling.collectives import group_shapes, measure_collectives
from meshwright.runtime.profiling.run import (
    Here,
    Record,
    TaskOutcome,
    describe,
    seconds_for,
    together,
    work_on,
)
from meshwright.runtime.profiling.tasks import Task
from meshwright.runtime.profiling.team import Failed

Answer = tuple[Machine, int, Record | None, str]
"""Whose, of which task, what was measured or why not."""


@dataclass(frozen=True, eq=False)
class RankRun(ProfilingRun):
    """What `ProfilingRun` does, on one of several ranks. Ranks but 0 have a store in memory."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def check(self) -> None:
        """MismatchError unless there is a rank for each device of the cluster."""
        if dist.get_world_size() != self.cluster.num_devices:
            raise MismatchError(
                f"cluster {self.cluster.name} has {self.cluster.num_devices} devices and this job "
                f"{dist.get_world_size()} ranks: start one per device"
            )

    @property
    def processes(self) -> int:
        return 1 if self.device.type == "cuda" else dist.get_world_size() // self.cluster.num_nodes

    def tasks(self, phase: str, graph: Graph | None, tasks: Sequence[Task]) -> None:
        machines: list[Machine] = of_all(self.machine)
        unknown: dict[Machine, list[int]] = from_first(
            {
                machine: [
                    i for i, t in enumerate(tasks) if not self.store.has(machine, *t.identity)
                ]
                for machine in dict.fromkeys(machines)
            }
        )
        by = Here(work_on(graph, tasks, self.device, self.processes))
        shown, ends, outcome = self.shown.phase(phase), self.deadline(phase), TaskOutcome()
        rounds = dealt(machines, unknown, alike=self.device.type == "cpu")
        for number, round_ in enumerate(rounds):
            # Decided by one, for all.
            share_s = from_first(seconds_for(tasks[0], ends, len(rounds) - number))
            if share_s is None:
                outcome.left += len(set(_numbers(rounds[number:])))
                break
            mine = round_[self.rank]
            shown.update(number, len(rounds), "" if mine is None else describe(tasks[mine]))
            dist.barrier()
            self._keep(tasks, of_all(self._answer(by, mine, share_s)), outcome)
        self.outcomes.append(outcome)

    def _answer(self, by: Here, task: int | None, share_s: float) -> Answer | None:
        if task is None:
            return None
        try:
            return self.machine, task, by.measure(task, share_s)[0], ""
        except Failed as error:
            return self.machine, task, None, str(error)

    def _keep(
        self, tasks: Sequence[Task], answers: Sequence[Answer | None], outcome: TaskOutcome
    ) -> None:
        """Stores what the ranks of a machine say of a task, together."""
        held: dict[tuple[Machine, int], list[Answer]] = {}
        for answer in answers:
            if answer is not None:
                held.setdefault(answer[:2], []).append(answer)
        for (machine, task), found in held.items():
            errors = [error for _, _, _, error in found if error]
            if errors:
                outcome.failed.append(f"{describe(tasks[task])}: {errors[0]}")
            else:
                self.store.add(machine, together([r for _, _, r, _ in found if r is not None]))
                outcome.measured += 1

    @property
    def free_bytes(self) -> int:
        return int(from_first(super().free_bytes))

    def memory(self, problem: Problem | None) -> None:
        """One rank is like another."""
        if self.rank == 0:
            super().memory(problem)

    def copies(self) -> None:
        if self.rank == 0:
            super().copies()

    def collectives(self) -> None:
        if self.cluster.num_devices == 1:
            return
        budget_s = from_first(self.collectives_s())
        if budget_s <= 0:
            return
        shown = self.shown.phase("collectives")
        found = measure_collectives(
            self.cluster, group_shapes(self.cluster), budget_s=budget_s, rank=self.rank,
            world=dist.get_world_size(), device=self.device,
        )  # fmt: skip
        for number, record in enumerate(found):
            self.store.add(self.machine, record)
            shown.update(number + 1, number + 1, f"{record.operation} {record.nbytes} bytes")

    def result(self) -> Profile:
        found: Profile = from_first(self.store.load(self.machine))
        return found


def dealt(
    machines: Sequence[Machine], unknown: dict[Machine, list[int]], *, alike: bool
) -> list[list[int | None]]:
    """Rounds: the task of each rank. `alike`: all ranks of a machine have the same one."""
    rounds: list[list[int | None]] = []
    for machine, numbers in unknown.items():
        ranks = [rank for rank, its in enumerate(machines) if its == machine]
        step = 1 if alike else len(ranks)
        for index in range(0, len(numbers), step):
            while len(rounds) <= index // step:
                rounds.append([None] * len(machines))
            for place, rank in enumerate(ranks):
                number = index if alike else index + place
                if number < len(numbers):
                    rounds[index // step][rank] = numbers[number]
    return rounds


def _numbers(rounds: Sequence[Sequence[int | None]]) -> list[int]:
    return [number for row in rounds for number in row if number is not None]
