"""`mw.profile`: measures what plans of a model on a cluster are made of, into one file."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.forms.updates import USUAL
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import USUAL as USUAL_PRECISION
from meshwright.ir.precision import precision_for
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import open_store
from meshwright.ir.trace.trace import trace
from meshwright.planner.pins.constraints import Constraint, pinned
from meshwright.planner.problem.kernels import kernels_for
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.progress import ProfilingProgress
from meshwright.profiling.ranks import RankRun
from meshwright.profiling.run import ProfilingRun
from meshwright.profiling.work import block_tasks, tasks_of_plans
from meshwright.runtime.job.machine import machine as this_machine
from meshwright.runtime.profiling.optimizers import optimizer_tasks
from meshwright.runtime.profiling.tasks import Task
from meshwright.runtime.world.world import join, rank, take

_TIMEOUT_S = 600.0


def profile(
    model_or_graph: Any,
    cluster: Cluster,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    precision: str = "",
    optimizer: str = USUAL,
    path: Path | str | None = None,
    minutes: float | None = None,
    constraints: Sequence[str | Constraint] = (),
    plans: Sequence[Plan] | None = None,
    compiled: bool = False,
    progress: bool = True,
) -> Profile:
    """Measures this machine: the blocks that plans of the model need, collectives, the optimizer.

    Without a model (None), what all models share. With `plans`, only the blocks that these need and
    no ops. `compiled`: blocks as torch.compile makes them too, so that plans may ask for it; so
    does the constraint `compile=true`. With `path`, what is done is kept there and not measured
    again. `minutes` is the most that it takes; what most plans need comes first.

    Under torchrun every rank calls it: one per device of the cluster. Else it forks on a CPU, so it
    must run before this process joins a process group.
    """
    if minutes is not None and minutes <= 0:
        raise PlanError(f"minutes is {minutes}; it must be positive, such as 5")
    device = _device(cluster)
    graph, asked = None, precision or USUAL_PRECISION
    if model_or_graph is not None:
        given = isinstance(model_or_graph, Graph)
        names, wins = kernels_for([cluster])
        graph = model_or_graph if given else trace(
            model_or_graph, example_inputs, loss_fn, precision=asked, kernels=names, wins=wins
        )  # fmt: skip
        asked = precision_for(graph, precision)
    problem = _problem(graph, cluster, asked, optimizer, tuple(constraints))
    kind, joined = ProfilingRun, False
    if "RANK" in os.environ or dist.is_initialized():
        joined = join(cluster.num_devices, device, _TIMEOUT_S)
        take(device)
        kind = RankRun if dist.is_initialized() else ProfilingRun
    first = rank() == 0
    with (
        open_store(path if path and first else ":memory:") as store,
        ProfilingProgress(show=progress and first, minutes=minutes) as shown,
    ):
        run = kind(cluster, store, this_machine(device), device, shown, minutes)
        run.check()
        store.add(run.machine)
        run.tasks("blocks", graph, _blocks(problem, plans, compiled))
        run.tasks("optimizer", None, optimizer_tasks(optimizer, run.free_bytes))
        run.collectives()
        run.copies()
        run.memory(problem)
        run.tasks("ops", None, run.ops(problem, asked) if plans is None else ())
        run.warn()
        found = run.result()
    if joined:
        dist.destroy_process_group()
    return found


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


def _blocks(
    problem: Problem | None, plans: Sequence[Plan] | None, compiled: bool
) -> Sequence[Task]:
    if problem is None:
        return ()
    if plans is not None:
        return tasks_of_plans(problem, plans)
    asked = pinned(problem.constraints, "compile") == "true"
    return block_tasks(problem, compiled=compiled or asked)


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
