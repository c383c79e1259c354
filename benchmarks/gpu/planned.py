"""Plans of the day: searched before, where that is possible, and jobs of them.

Models are traced on the day, in about 3 s each: a trace made with other versions of torch and
transformers may be of another model. A plan says of which one it is, so it can be taken along.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.eager import LR
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.results import PROFILE
from benchmarks.gpu.step import Fact, Place
from benchmarks.gpu.workloads import PRECISION, WORKLOADS, Batch, Workload, on
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, MeshwrightError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction
from meshwright.ir.profile.profile import Profile
from meshwright.ir.profile.profile_store import load_profile
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job

_LOOKS = 4
"""Batches that are tried below what memory in proportion allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan for one device, and the graph that it is of."""

    recipe: Recipe
    graph: Graph
    plan: Plan
    origin: str
    """How it came about: prepared, or why it was searched here."""

    @property
    def workload(self) -> Workload:
        """Its model."""
        return WORKLOADS[self.recipe.workload]

    @property
    def predicted(self) -> Prediction:
        """By the preset, when it was searched."""
        assert self.plan.predicted is not None
        return self.plan.predicted

    def facts(self, row: str) -> Iterator[Fact]:
        """Yields what the plan says, as a row of a table."""
        memory = self.predicted.stages[0].memory
        yield f"{row}/plan", self.origin
        yield f"{row}/samples", self.plan.global_batch_size
        yield f"{row}/predicted_s", self.predicted.step_s
        yield f"{row}/band", self.predicted.error_band
        yield f"{row}/predicted_bytes", memory.used_bytes
        yield f"{row}/predicted_tensor_bytes", memory.tensor_bytes
        if memory.host_bytes:
            yield f"{row}/host_bytes", memory.host_bytes


def file_of(folder: Path, cluster: Cluster, recipe: Recipe) -> Path:
    """Where a recipe's plan for a cluster lies once it is prepared."""
    return folder / cluster.device_types[0].name / f"{recipe.name}.json"


def traced(recipe: Recipe, tiny: bool, samples: int = 0, plan: Plan | None = None) -> Graph:
    """The graph of a recipe; with the kernels of a plan, if one is given."""
    workload = WORKLOADS[recipe.workload]
    return workload.graph(tiny, samples=samples, dropout=recipe.dropout,
                          kernels=plan.kernels if plan else ())  # fmt: skip


def search_plan(recipe: Recipe, cluster: Cluster, tiny: bool) -> Plan:
    """Searches the plan of a recipe; Infeasible if nothing fits. It needs ortools."""
    if recipe.largest and not tiny:
        return _largest(recipe, cluster)
    return _of_batch(recipe, cluster, tiny, 0)


def _of_batch(recipe: Recipe, cluster: Cluster, tiny: bool, samples: int) -> Plan:
    from meshwright.planner.search.search import search

    workload = WORKLOADS[recipe.workload]
    return search(
        workload.model(tiny, "meta", recipe.dropout), cluster, constraints=recipe.pins,
        example_inputs=workload.batch(tiny, samples), loss_fn=workload.loss_fn,
        kernels=recipe.kernels, precision=PRECISION, progress=False,
    )  # fmt: skip


def _largest(recipe: Recipe, cluster: Cluster) -> Plan:
    """Of the largest batch: memory grows in proportion to it, so two batches tell where to look."""
    few = WORKLOADS[recipe.workload].sizes[0]
    first, second = (_peak_bytes(_of_batch(recipe, cluster, False, n)) for n in (few, 2 * few))
    room = min(device.usable_bytes for device in cluster.device_types)
    samples = few + int((room - first) * few / (second - first))
    for fewer in range(_LOOKS):
        try:
            return _of_batch(recipe, cluster, False, samples - fewer)
        except Infeasible:
            continue
    raise Infeasible(f"{recipe.name}: no plan for {samples - _LOOKS + 1} samples, where memory in "
                     f"proportion allows {samples}")  # fmt: skip


def _peak_bytes(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.peak_bytes


def planned(place: Place, recipe: Recipe) -> Planned:
    """The plan that was prepared for this device, if it is of the model as it is traced here."""
    cluster, tiny = place.cluster(), place.rehearsal
    path = file_of(place.plans, cluster, recipe)
    why = "none was prepared"
    if path.exists():
        plan = plan_io.load(path)
        graph = traced(recipe, tiny, plan.global_batch_size, plan)
        if plan.model.fingerprint == graph.fingerprint:
            return Planned(recipe=recipe, graph=graph, plan=plan, origin="prepared")
        why = "the model is another one by this torch and transformers than the prepared one"
    plan = search_plan(recipe, cluster, tiny)
    graph = traced(recipe, tiny, plan.global_batch_size, plan)
    return Planned(recipe=recipe, graph=graph, plan=plan, origin=f"searched here: {why}")


def resized(found: Planned, place: Place, samples: int) -> Planned:
    """The same plan for another batch, which nobody predicts: whether it fits is to be tried."""
    (stage,) = found.plan.stages
    plan = replace(
        found.plan, global_batch_size=samples, predicted=None,
        stages=(replace(stage, batch_shares=(samples,)),),
    )  # fmt: skip
    graph = traced(found.recipe, place.rehearsal, samples, plan)
    inputs = tuple(replace(i, shape=(samples, *i.shape[1:])) for i in plan.model.inputs)
    model = replace(plan.model, fingerprint=graph.fingerprint, inputs=inputs)
    return replace(found, graph=graph, plan=plan_io.rehash(replace(plan, model=model)))


def prepare(recipes: Sequence[Recipe], clusters: Sequence[Cluster], folder: Path,
            tiny: bool) -> Iterator[tuple[Path, str]]:  # fmt: skip
    """Searches and writes all plans; yields each file and what went wrong, if anything did."""
    for cluster in clusters:
        for recipe in recipes:
            path = file_of(folder, cluster, recipe)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                plan_io.save(search_plan(recipe, cluster, tiny), path)
                yield path, ""
            except MeshwrightError as error:  # the others are prepared all the same
                yield path, str(error)


def profile_of(place: Place) -> Profile | None:
    """What an earlier step has measured here."""
    path = place.out / PROFILE
    return load_profile(path) if path.exists() and path.stat().st_size else None


def predict_again(found: Planned, cluster: Cluster, profile: Profile) -> Prediction:
    """The plan's prediction with a profile. It needs ortools."""
    from meshwright.planner.problem.predict import predict_plan
    from meshwright.planner.problem.problem import make_problem

    problem = make_problem(found.graph, cluster, precision=found.plan.precision, profile=profile,
                           optimizer=found.plan.optimizer)  # fmt: skip
    return predict_plan(problem, found.plan)


def job_of(found: Planned, place: Place) -> Job:
    """The job, whose module is on the host: the device has the job's own tensors alone."""
    model = found.workload.model(place.rehearsal, place.device, found.recipe.dropout).cpu()
    return compile_job(
        model, found.plan, optimizer="adamw", lr=LR, device=place.device, check=False,
        graph=found.graph, loss_fn=found.workload.loss_fn,
    )  # fmt: skip


def batch_of(found: Planned, place: Place) -> Batch:
    """A batch of the plan's size on the device."""
    return on(found.workload.batch(place.rehearsal, found.plan.global_batch_size), place.device)
