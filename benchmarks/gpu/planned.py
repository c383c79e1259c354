"""Plans of the day: searched before, where that is possible, and jobs of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.eager import LR
from benchmarks.gpu.results import PROFILE
from benchmarks.gpu.step import Place
from benchmarks.gpu.workloads import PRECISION, Workload
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job

PLAIN = ("recompute=none", "saved=none", "num_microbatches=1")
"""Pins of a plan that does what eager PyTorch does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for one device of a cluster, and the graph that it is of."""

    graph: Graph
    plan: Plan
    origin: str
    """How it came about: prepared, or why it was searched here."""

    @property
    def predicted(self) -> Prediction:
        """By the preset, when it was searched."""
        assert self.plan.predicted is not None
        return self.plan.predicted


def file_of(folder: Path, cluster: Cluster, workload: str) -> Path:
    """Where the plan of a workload lies that was prepared for a cluster."""
    return folder / cluster.device_types[0].name / f"{workload}.json"


def search_here(graph: Graph, cluster: Cluster, pins: Sequence[str], **more: Any) -> Plan:
    """Searches a plan; on a machine with all packages."""
    from meshwright.planner.search.search import search  # it needs ortools

    return search(graph, cluster, constraints=tuple(pins), progress=False, **more)


def planned(place: Place, workload: Workload) -> Planned:
    """The plan that was prepared for this device, if it is of the model as it is traced here."""
    cluster = place.cluster()
    graph = workload.graph(place.rehearsal)
    path = file_of(place.plans, cluster, workload.name)
    why = "none was prepared"
    if path.exists():
        plan = plan_io.load(path)
        if plan.model.fingerprint == graph.fingerprint:
            return Planned(graph=graph, plan=plan, origin="prepared")
        why = "the model is another one by this torch and transformers than the prepared one"
    plan = search_here(graph, cluster, PLAIN, precision=PRECISION)
    return Planned(graph=graph, plan=plan, origin=f"searched here: {why}")


def profile_of(place: Place) -> Profile | None:
    """What an earlier step has measured here."""
    path = place.out / PROFILE
    return load_profile(path) if path.exists() and path.stat().st_size else None


def predict_again(graph: Graph, cluster: Cluster, plan: Plan, profile: Profile) -> Prediction:
    """The plan's prediction with a profile; on a machine with all packages."""
    from meshwright.planner.problem.predict import predict_plan  # it needs ortools
    from meshwright.planner.problem.problem import make_problem

    problem = make_problem(graph, cluster, precision=plan.precision, profile=profile,
                           optimizer=plan.optimizer)  # fmt: skip
    return predict_plan(problem, plan)


def job_of(found: Planned, workload: Workload, place: Place, dropout: float = 0.0) -> Job:
    """The job, whose module is on the host: the device has the job's own tensors alone."""
    model = workload.model(place.rehearsal, place.device, dropout).cpu()
    return compile_job(
        model, found.plan, optimizer="adamw", lr=LR, device=place.device, check=False,
        graph=found.graph, loss_fn=workload.loss_fn,
    )  # fmt: skip
