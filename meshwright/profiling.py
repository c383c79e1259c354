"""`mw.profile`: measures what plans of a model on a cluster are made of, into one file."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any
from warnings import warn

import torch

from meshwright.ir.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.ir.profile import Machine, MemoryRecord, Profile
from meshwright.ir.profile_store import ProfileStore, open_store
from meshwright.ir.trace import trace
from meshwright.planner.constraints import Constraint
from meshwright.planner.problem import Problem, make_problem
from meshwright.profiling_memory import heap_plans
from meshwright.profiling_ops import grid, op_tasks
from meshwright.profiling_progress import ProfilingProgress
from meshwright.profiling_work import block_tasks, tasks_of_plans
from meshwright.runtime.machine import machine as this_machine
from meshwright.runtime.profiling.collectives import group_shapes
from meshwright.runtime.profiling.gloo_forks import forked_collectives
from meshwright.runtime.profiling.heap import Grown, grown, memory_records
from meshwright.runtime.profiling.optimizers import free_bytes, optimizer_tasks
from meshwright.runtime.profiling.process import process_records
from meshwright.runtime.profiling.run import Outcome, measure_all, measurer
from meshwright.runtime.profiling.tasks import Task
from meshwright.runtime.profiling.team import Failed, Team, first_lines

_SHARES = {"blocks": 0.6, "optimizer": 0.05, "collectives": 0.25}
"""Of the time that is given; the rest, and what they leave, goes to ops."""
_COLLECTIVES_S = 40.0
_OPS_S = 60.0
"""If no time is given."""


def profile(
    model_or_graph: Any,
    cluster: Cluster,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    path: Path | str | None = None,
    minutes: float | None = None,
    constraints: Sequence[str | Constraint] = (),
    plans: Sequence[Plan] | None = None,
    progress: bool = True,
) -> Profile:
    """Measures this machine: the blocks that plans of the model need, collectives, the optimizer.

    Without a model (None), what all models share. With `plans`, only the blocks that these need and
    no ops. With `path`, what is done is kept there and not
    measured again. `minutes` is the most that it takes; what most plans need comes first. It forks,
    so it must run before this process uses a GPU or joins a process group.
    """
    if minutes is not None and minutes <= 0:
        raise PlanError(f"minutes is {minutes}; it must be positive, such as 5")
    device = _device(cluster)
    graph = None
    if model_or_graph is not None:
        given = isinstance(model_or_graph, Graph)
        graph = model_or_graph if given else trace(model_or_graph, example_inputs, loss_fn)
    problem = _problem(graph, cluster, precision, optimizer, tuple(constraints))
    with (
        open_store(path or ":memory:") as store,
        ProfilingProgress(show=progress, minutes=minutes) as shown,
    ):
        run = _Run(cluster, store, this_machine(device), device, shown, minutes)
        store.add(run.machine)
        run.tasks("blocks", graph, _blocks(problem, plans))
        run.tasks("optimizer", None, optimizer_tasks(optimizer, run.free_bytes))
        run.memory(problem)
        run.collectives()
        run.tasks("ops", None, run.ops(problem, precision) if plans is None else ())
        run.warn()
        return store.load(run.machine)


def _problem(
    graph: Graph | None,
    cluster: Cluster,
    precision: str,
    optimizer: str,
    constraints: tuple[str | Constraint, ...],
) -> Problem | None:
    if graph is None:
        return None
    return make_problem(
        graph, cluster, optimizer=optimizer, precision=precision, constraints=constraints
    )


def _blocks(problem: Problem | None, plans: Sequence[Plan] | None) -> Sequence[Task]:
    if problem is None:
        return ()
    return block_tasks(problem) if plans is None else tasks_of_plans(problem, plans)


def _device(cluster: Cluster) -> torch.device:
    """What this process measures on; PlanError if the machine has none of the cluster's kind."""
    kinds = {device.kind for device in cluster.device_types}
    if "cuda" not in kinds:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError(
            f"cluster {cluster.name} is made of GPUs and this machine has none: profile there"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _grown(
    graph: Graph, plan: Plan, device: torch.device, task: int, budget_s: float, agree: object
) -> Grown:
    return grown(graph, plan, device)


@dataclass(frozen=True, eq=False)
class _Run:
    """One profiling of one machine."""

    cluster: Cluster
    store: ProfileStore
    machine: Machine
    device: torch.device
    shown: ProfilingProgress
    minutes: float | None
    started: float = field(default_factory=monotonic)
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

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
                    deadline=self._deadline(phase), shown=shown,
                )
            )  # fmt: skip

    def ops(self, problem: Problem | None, precision: str) -> Sequence[Task]:
        """Those of the model, else common ones."""
        if problem is not None:
            return op_tasks(problem)
        return grid(precision, self.machine.kind, self.free_bytes)

    def _deadline(self, phase: str) -> float:
        if self.minutes is None:
            # Ops serve where a block was not measured: not worth any time.
            return monotonic() + _OPS_S if phase == "ops" else float("inf")
        total = 60 * self.minutes
        if phase in _SHARES:
            return min(self.started + total, monotonic() + _SHARES[phase] * total)
        return self.started + total

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
        plans = heap_plans(problem, self.free_bytes * self.processes)
        found = []
        for number, plan in enumerate(plans):
            if monotonic() > self._deadline("memory"):
                break
            shown.update(number, len(plans), f"heap, {plan.num_microbatches} micro-batches")
            # In a process that has just begun: the heap has no holes yet.
            with Team(1, partial(_grown, problem.graph, plan, self.device)) as child:
                try:
                    found += child.measure(0, 0.0)
                except Failed as error:
                    self.notes.append(f"the heap of {plan.model.name} is not measured: {error}")
        if found:
            self.store.add(self.machine, *memory_records(model, found))

    def collectives(self) -> None:
        """Between this machine's processes, unless the store has those of all kinds of groups."""
        if self.cluster.num_devices == 1:
            return
        if self.device.type == "cuda" or self.cluster.num_nodes > 1:
            self.notes.append(
                "links are not measured from one process: run under torchrun, a process per device"
            )
            return
        known = {record.group for record in self.store.load(self.machine).collectives}
        if known.issuperset(group_shapes(self.cluster)):
            return
        shown = self.shown.phase("collectives")
        budget_s = _COLLECTIVES_S if self.minutes is None else self._deadline("collectives")
        if self.minutes is not None:
            budget_s -= monotonic()
        for number, record in enumerate(forked_collectives(self.cluster, budget_s)):
            self.store.add(self.machine, record)
            shown.update(number + 1, number + 1, f"{record.operation} {record.nbytes} bytes")

    def warn(self) -> None:
        """Says what could not be done."""
        left = sum(outcome.left for outcome in self.outcomes)
        failed = [text for outcome in self.outcomes for text in outcome.failed]
        if left:
            self.notes.append(f"{left} measurements were left out, for lack of time")
        if failed:
            self.notes.append(f"{len(failed)} could not be measured: {first_lines(failed, 3)}")
        for note in self.notes:
            warn(note, stacklevel=3)
