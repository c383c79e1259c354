"""Jobs whose tables have caches."""

from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from tests.form_files.words import STEPS, batch, model

IDS = {"words.weight": "0", "marks.weight": "1"}


@cache
def traced(precision: str) -> Graph:
    """For plans, and for the jobs of ranks that are forked after them."""
    own = model() if precision == "fp64" else model().float()
    return trace(own, batch(0) if precision == "fp64" else narrow(0), precision=precision)


def plan_of(
    ranks: int, optimizer: str, precision: str = "fp64", cached: bool = True,
    sizes: dict[str, int] | None = None, **settings: Setting,
) -> Plan:  # fmt: skip
    """`cached`: else tables are as ever, on one rank; `sizes`: of the mesh, else replicas."""
    problem = make_problem(
        traced(precision), Cluster.local(ranks), precision=precision, optimizer=optimizer
    )
    mesh: dict[str, Any] = dict(sizes or {"zero": 1, "dp_shard": ranks})
    choice = uniform_choice(problem, num_microbatches=2, **mesh)
    plan = build_plan(problem, choice, predict=False)
    if not cached:
        return plan
    said = {}
    for path, ids in IDS.items():
        store = FormChoice(form="cached", settings={"ids": ids, **settings})
        shared = mesh.get("dp_shard", 1) > 1
        sync = FormChoice(form="owned_rows", settings={"ids": ids}) if shared else None
        said[path] = ParameterChoice(zero=1 if shared else 0, sync=sync, store=store)
    return replace(plan, stages=tuple(replace(s, by_parameter=said) for s in plan.stages))


def narrow(step: int) -> tuple[Tensor, ...]:
    """A batch for a model in float32."""
    return tuple(x.float() if x.is_floating_point() else x for x in batch(step))


def job_of(plan: Plan, **more: Any) -> Any:
    full = plan.precision == "fp64"
    return compile_job(
        model() if full else model().float(), plan, optimizer=plan.optimizer, lr=0.05,
        device="cpu", example_inputs=batch(0) if full else narrow(0),
        graph=traced(plan.precision), **{"check": False, **more},
    )  # fmt: skip


def trained(
    plan: Plan, depth: int = 0, clip: float | None = None, broken: str = "", read: bool = False,
    then: Plan | None = None, **more: Any,
) -> tuple[list[float], dict[str, Any], list[Any]]:  # fmt: skip
    """`depth`: batches that are announced; `read`: somebody looks at all after each step;
    `broken`: a folder, by which another job goes on after three steps, as `then` says."""
    job, losses = job_of(plan, max_grad_norm=clip, **more), []
    give = batch if plan.precision == "fp64" else narrow
    for step in range(STEPS):
        if broken and step == 3:
            job.save(broken)
            job.close()
            job = job_of(then or plan, max_grad_norm=clip, **more)
            job.load(broken)
        coming = [give(n) for n in range(step + 1, min(step + 1 + depth, STEPS))]
        first, later = (coming[0], coming[1:]) if coming else (None, ())
        losses.append(float(job.step(give(step), next_batch=first, later=later)))
        if read:
            full_state(job)
            job.eval(give(0))
    found = [found for stage in job.parts.stages.values() for found in stage.sync.found]
    state = full_state(job)
    job.close()
    return losses, state, found


def all_trained(cases: list[tuple[Plan, dict[str, Any]]]) -> list[Any]:
    """Of each plan what `trained` returns, one after the other."""
    return [trained(plan, **how) for plan, how in cases]
