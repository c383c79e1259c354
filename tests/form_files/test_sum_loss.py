"""A loss that is a sum over samples, and no mean: forms of tables add up each rank's part once."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Zero
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.words import STEPS, Words, assert_equal, batch

FORMS: dict[str, Zero] = {
    "gathered_rows": 0, "packed_rows": 0, "owned_rows": 1, "late_columns": 1,
}  # fmt: skip
IDS = {"words.weight": "0", "marks.weight": "1"}
LR = 0.01


class Summed(Words):
    def forward(self, ids: Tensor, others: Tensor, y: Tensor) -> Tensor:
        x = self.words(ids).mean(1) + self.marks(others)
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y, reduction="sum")


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Summed().double().train()


def plain() -> Any:
    own, losses = model(), []
    stepped = torch.optim.AdamW(own.parameters(), lr=LR)
    for step in range(STEPS):
        stepped.zero_grad()
        loss = own(*batch(step))
        loss.backward()
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}


def plan_of(form: str, zero: Zero, graph: Any) -> Plan:
    problem = make_problem(graph, Cluster.local(3), precision="fp64", optimizer="adamw")
    shape = {"dp_shard": 3, "zero": 1} if zero else {"dp_replicate": 3}
    plan = build_plan(problem, uniform_choice(problem, num_microbatches=2, **shape), predict=False)
    said = {
        path: ParameterChoice(
            zero=zero, sync=FormChoice(form=form, settings={"ids": ids} if zero else {})
        )
        for path, ids in IDS.items()
    }
    stage = replace(plan.stages[0], by_parameter=said, batch_shares=(3, 2, 1))
    return replace(plan, stages=(stage,))


def trained(plans: list[Plan], graph: Any) -> list[Any]:
    found = []
    for plan in plans:
        job = compile_job(model(), plan, optimizer="adamw", lr=LR, device="cpu", graph=graph,
                          check=False)  # fmt: skip
        losses = [float(job.step(batch(step), next_batch=batch(step + 1))) for step in range(STEPS)]
        found.append((losses, full_state(job)))
        job.close()
    return found


def test_sums_are_those_of_one_process() -> None:
    """On three ranks of unequal shares, in two micro-batches."""
    graph = trace(model(), batch(0))
    plans = [plan_of(form, zero, graph) for form, zero in FORMS.items()]
    wanted = alone(plain)
    for found in run_ranks(3, trained, plans, graph)[0]:
        assert_equal(found, wanted)
