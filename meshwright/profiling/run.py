"""One profiling of one machine, phase by phase, from a single process."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from time import monotonic
from warnings import warn

import torch

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.profile import Machine, MemoryRecord, Profile
from meshwright.ir.profile.profile_store import ProfileStore
from meshwright.planner.problem.problem import Problem
from meshwright.profiling.memory import heap_plans, rounds
from meshwright.profiling.ops import grid, op_tasks
from meshwright.profiling.progress import ProfilingProgress
from meshwright.runtime.profiling.collectives import group_shapes
from meshwright.runtime.profiling.copies import measure_copies
from meshwright.runtime.profiling.gloo_forks import forked_collectives
from meshwright.runtime.profiling.heap import Grown, grown, memory_records
from meshwright.runtime.profiling.optimizers import free_bytes
from meshwright.runtime.profiling.process import process_records
from meshwright.runtime.profiling.run import Here, TaskOutcome, measure_all, measurer
from meshwright.runtime.profiling.tasks import Task
from meshwright.runtime.profiling.team import Failed, Team, first_lines

_SHARES = {"blocks": 0.55, "optimizer": 0.05, "collectives": 0.25, "copies": 0.02, "memory": 0.08}
"""Of the time that is given, in the order in which they come: what one leaves goes to those after
it, and the rest to ops."""
_UNTIL = dict(zip(_SHARES, accumulate(_SHARES.values()), strict=True))
"""When each is over at the latest if all before took their time."""
_USUAL_S = {"collectives": 40.0, "copies": 10.0, "ops": 60.0}
"""If no time is given. Ops serve where a block was not measured: not worth any time."""
_LEAST_S = 1.0


def _grown(
    graph: Graph, plan: Plan, device: torch.device, task: int, budget_s: float, agree: object
) -> Grown:
    return grown(graph, plan, device)


@dataclass(frozen=True, eq=False)
class ProfilingRun:
    """One profiling of one machine."""

    cluster: Cluster
    store: ProfileStore
    machine: Machine
    device: torch.device
    shown: ProfilingProgress
    minutes: float | None
    started: float = field(default_factory=monotonic)
    outcomes: list[TaskOutcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Whether this process can measure what it is asked for: alone it does what it can."""

    @property
    def processes(self) -> int:
        """That measure at once: as many as have a core each."""
        if self.device.type == "cuda":
            return 1
        return max(1, min(self.cluster.num_devices, self.machine.cores))

    @property
    def free_bytes(self) -> int:
        return free_bytes(self.device, self.processes)

    def tasks(self, phase: str, graph: Graph | None, tasks: Sequence[Task]) -> None:
        """Measures what the store does not have."""
        shown = self.shown.phase(phase)
        unknown = [t for t in tasks if not self.store.has(self.machine, *t.identity)]
        if not unknown:
            return
        with measurer(graph, unknown, self.device, self.processes) as by:
            self.outcomes.append(
                measure_all(
                    unknown, by, self.store, self.machine,
                    deadline=self.deadline(phase), shown=shown,
                )
            )  # fmt: skip

    def ops(self, problem: Problem | None, precision: str) -> Sequence[Task]:
        """Those of the model, else common ones."""
        if problem is not None:
            return op_tasks(problem)
        return grid(precision, self.machine.kind, self.free_bytes)

    def deadline(self, phase: str) -> float:
        """When to stop, by `time.monotonic`."""
        if self.minutes is None:
            return monotonic() + _USUAL_S.get(phase, float("inf"))
        total = 60 * self.minutes
        own_s = monotonic() + _SHARES.get(phase, 1.0) * total
        return min(self.started + total, max(own_s, self.started + _UNTIL.get(phase, 1.0) * total))

    def memory(self, problem: Problem | None) -> None:
        """What processes take by themselves, and the heap of this model's training."""
        shown = self.shown.phase("memory")
        shown.update(0, 1, "process")
        if not self.store.has(self.machine, MemoryRecord, "process"):
            self.store.add(self.machine, *process_records(self.device))
        shown.update(1, 1, "")
        if problem is None:
            return
        model = problem.graph.fingerprint
        if self.store.has(self.machine, MemoryRecord, f"fragmentation {model}"):
            return
        free = free_bytes(self.device, 1)
        plans = heap_plans(problem, free)
        # In a process that has just begun, where no heap has holes yet: on a CPU, so all at once.
        at_once = rounds(plans, free) if self.device.type == "cpu" else [[plan] for plan in plans]
        ends, found = self.deadline("memory"), []
        for number, some in enumerate(at_once):
            if monotonic() > ends:
                self.notes.append("the heap is not measured in all ways, for lack of time")
                break
            counts = ", ".join(str(plan.num_microbatches) for plan in some)
            shown.update(number, len(at_once), f"heap, {counts} micro-batches")
            found += self._heaps(problem.graph, some)
        if found:
            self.store.add(self.machine, *memory_records(model, found))

    def _heaps(self, graph: Graph, plans: Sequence[Plan]) -> list[Grown]:
        """On a CPU each in a process of its own, forked now."""
        found: list[Grown] = []
        works = [partial(_grown, graph, plan, self.device) for plan in plans]
        with ExitStack() as stack:
            by: list[Here | Team] = []
            for work in works:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                    by.append(Here(work))
                else:
                    team = stack.enter_context(Team(1, work))
                    team.ask(0, 0.0)
                    by.append(team)
            for each, plan in zip(by, plans, strict=True):
                try:
                    found += each.answers() if isinstance(each, Team) else each.measure(0, 0.0)
                except Failed as error:
                    self.notes.append(f"the heap of {plan.model.name} is not measured: {error}")
        return found

    def collectives(self) -> None:
        """Between this machine's processes, unless the store has those of all kinds of groups."""
        if self.cluster.num_devices == 1:
            return
        if self.device.type == "cuda" or self.cluster.num_nodes > 1:
            self.notes.append(
                "links are not measured from one process: run under torchrun, a process per device"
            )
            return
        budget_s = self.collectives_s()
        if budget_s <= 0:
            return
        shown = self.shown.phase("collectives")
        for number, record in enumerate(forked_collectives(self.cluster, budget_s)):
            self.store.add(self.machine, record)
            shown.update(number + 1, number + 1, f"{record.operation} {record.nbytes} bytes")

    def collectives_s(self) -> float:
        """The time for them; none if the store has those of all kinds of groups."""
        known = {(r.group, r.groups_at_once) for r in self.store.load(self.machine).collectives}
        world = self.cluster.num_devices
        if known.issuperset((s, world // s.size) for s in group_shapes(self.cluster)):
            return 0.0
        left = self.deadline("collectives") - monotonic()
        if left < _LEAST_S:
            self.notes.append("collectives are not measured, for lack of time")
            return 0.0
        return left

    def copies(self) -> None:
        """Between host and device."""
        if self.device.type == "cpu" or self.store.load(self.machine).copies:
            return
        shown = self.shown.phase("copies")
        budget_s = self.deadline("copies") - monotonic()
        for number, record in enumerate(measure_copies(self.device, budget_s=budget_s)):
            self.store.add(self.machine, record)
            shown.update(number + 1, number + 1, f"{record.direction} {record.nbytes} bytes")

    def result(self) -> Profile:
        """All that is known of this machine."""
        return self.store.load(self.machine)

    def warn(self) -> None:
        """Says what could not be done."""
        left = sum(outcome.left for outcome in self.outcomes)
        failed = [text for outcome in self.outcomes for text in outcome.failed]
        if left:
            self.notes.append(f"{left} measurements were left out, for lack of time")
        if failed:
            self.notes.append(f"{len(failed)} could not be measured: {first_lines(failed, 3)}")
        for note in self.notes:
            warn(note, stacklevel=4)
