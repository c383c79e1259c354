"""Jobs whose tables have owners of rows, under any form for that."""

from dataclasses import replace
from typing import Any

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from tests.form_files.words import STEPS, batch, graph, model

IDS = {"words.weight": "0", "marks.weight": "1"}


def plan_of(
    ranks: int, optimizer: str, zero: int = 1, micro: int = 2, form: str = "owned_rows",
    **sizes: int,
) -> Plan:  # fmt: skip

    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer)
    sizes = sizes or {"dp_shard": ranks}
    choice = uniform_choice(problem, num_microbatches=micro, zero=zero, **sizes)
    plan = build_plan(problem, choice, predict=False)
    said = {
        path: ParameterChoice(zero=1, sync=FormChoice(form=form, settings={"ids": ids}))
        for path, ids in IDS.items()
    }
    return replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))


def job_of(plan: Plan, **more: Any) -> Any:
    return compile_job(
        model(), plan, optimizer=plan.optimizer, lr=0.05, device="cpu", example_inputs=batch(0),
        graph=graph(), **{"check": False, **more},
    )  # fmt: skip


def trained(
    plan: Plan, known: str = "all", clip: float | None = None, broken: str = ""
) -> tuple[list[float], dict[str, Any]]:
    job, losses = job_of(plan, max_grad_norm=clip), []
    for step in range(STEPS):
        if broken and step == 3:
            job.save(broken)
            job.close()
            job = job_of(plan, max_grad_norm=clip)
            job.load(broken)
        told = known == "all" or (known == "some" and step % 2)
        after = batch(step + 1) if told and step + 1 < STEPS else None
        losses.append(float(job.step(batch(step), next_batch=after)))
        if known == "read":
            full_state(job)
            job.eval(batch(0))
    state = full_state(job)
    job.close()
    return losses, state
