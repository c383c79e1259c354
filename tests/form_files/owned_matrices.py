"""Plans of a small model whose matrices have owners and are stepped by Muon, the rest by AdamW."""

from dataclasses import replace
from typing import Any, cast

import torch

from meshwright.forms.updates import update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Zero
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.sent import counted
from tests.form_files.small import LR, STEPS, batches, graph, model

MATRICES = ("layers.*.up.weight", "layers.*.down.weight")
BYTES = 3 * 2 * 48 * 12 * 8
"""Of those."""
NORM = 0.5
Trained = tuple[list[float], dict[str, torch.Tensor]]


def problem(ranks: int, **more: Any) -> Problem:
    return make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer="adamw", **more)


def plan_of(ranks: int, zero: int, rest: int = 1, **sizes: int) -> Plan:
    """`zero` of the matrices, 0: without owners; `rest`: of all else."""
    own = FormChoice(form="by_owner") if zero else None
    choice = ParameterChoice(zero=cast(Zero, zero), sync=own, update="muon")
    made = problem(ranks)
    shape = uniform_choice(
        made, num_microbatches=2, zero=cast(Zero, rest), **(sizes or {"dp_shard": ranks})
    )  # fmt: skip
    plan = build_plan(made, shape, predict=False)
    said = {name: choice for name in MATRICES}
    return replace(plan, stages=tuple(replace(s, by_parameter=said) for s in plan.stages))


def job_of(plan: Plan) -> Any:
    return compile_job(
        model(), plan, lr=LR, max_grad_norm=NORM, device="cpu", graph=graph(), check=False
    )


def train(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor], int, list[int]]:
    """Losses, parameters, values of Muon's state on this rank, bytes of the messages of a step."""
    job = job_of(plan)
    with counted(job) as sent:
        losses = [float(job.step(batch)) for batch in batches()]
    state = job.optimizer.state.values()
    held = sum(x.numel() for own in state for key, x in own.items() if key == "momentum_buffer")
    found = full_state(job)
    job.close()
    return losses, found, held, sent[-1]


def plain() -> Trained:
    """The same in plain PyTorch."""
    trained = model()
    named = dict(trained.named_parameters())
    own = [n for n in named if n.endswith(("up.weight", "down.weight"))]
    muon = update("muon").make([named[n] for n in own], LR, fused=False)
    adamw = update("adamw").make([p for n, p in named.items() if n not in own], LR, fused=False)
    losses = []
    for batch in batches():
        trained.zero_grad()
        loss = trained(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), NORM)
        muon.step()
        adamw.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in named.items()}


def begin(plan: Plan, folder: str) -> None:
    """Three steps, and a checkpoint."""
    job = job_of(plan)
    for batch in batches()[:3]:
        job.step(batch)
    job.save(folder)
    job.close()


def go_on(plan: Plan, folder: str) -> Trained:
    """The steps after it."""
    job = job_of(plan)
    job.load(folder)
    losses = [float(job.step(batch)) for batch in batches()[3:STEPS]]
    found = full_state(job)
    job.close()
    return losses, found


def most_tracked(plans: list[Plan]) -> list[int]:
    """The most bytes of each in the third step."""
    found = []
    for plan in plans:
        job = job_of(plan)
        for batch in batches()[:2]:
            job.step(batch)
        job.track_memory(batches()[2])
        found.append(job.tensor_memory.peak_bytes)
        job.close()
    return found
