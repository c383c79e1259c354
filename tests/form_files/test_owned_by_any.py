"""Owners step by any optimizer whose step of a parameter looks at that alone: nobody has to know
its class, which is found by trying it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.forms.trying import reach
from meshwright.forms.updates import Reach
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.small import batches, graph, model


class BothSides(torch.optim.Optimizer):
    """Shampoo (Gupta et al. 2018): each side of a gradient by a root of the sum of its squares."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(_rooted(p.grad, self.state[p]), alpha=-group["lr"])


def _rooted(gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
    found = gradient if gradient.ndim == 2 else gradient.reshape(-1, 1)
    for side, matrix in (("left", found @ found.T), ("right", found.T @ found)):
        old = state.get(side, 0.1 * torch.eye(len(matrix), dtype=matrix.dtype))
        state[side] = old + matrix
    for side in ("left", "right"):
        values, vectors = torch.linalg.eigh(state[side])
        root = (vectors * values.clamp_min(1e-8) ** -0.25) @ vectors.T
        found = root @ found if side == "left" else found @ root
    return found.reshape(gradient.shape)


def plan_of(zero: int, form: str) -> Plan:
    problem = make_problem(graph(), Cluster.local(3), precision="fp64")
    choice = uniform_choice(problem, dp_shard=3, zero=zero, num_microbatches=2)
    plan = build_plan(problem, choice, predict=False)
    sync = FormChoice(form=form) if form else None
    return replace(plan, stages=(replace(plan.stages[0], sync=sync),))


def train(plan: Plan) -> tuple[list[float], Any]:
    trained = model()
    made = BothSides(trained.parameters())
    job = compile_job(trained, plan, optimizer=made, device="cpu", graph=graph(), check=False)
    losses = [float(job.step(batch)) for batch in batches()]
    found = full_state(job)
    job.close()
    return losses, found


def plain() -> tuple[list[float], Any]:
    trained, losses = model(), []
    made = BothSides(trained.parameters())
    for batch in batches():
        made.zero_grad()
        loss = trained(*batch)
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().clone() for name, p in trained.named_parameters()}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_owners_step_by_it(zero: int) -> None:
    losses, state = run_ranks(3, train, plan_of(zero, "by_owner"))[0]
    wanted, parameters = alone(plain)
    assert wanted[-1] < wanted[0]
    assert losses == pytest.approx(wanted, rel=1e-9)
    for path, x in parameters.items():
        assert (state[path] - x).abs().max() <= 1e-9 * x.abs().max(), path


@pytest.mark.parametrize("zero", ["1", "3"])
def test_a_search_takes_owners_for_all_that_the_user_asks_for(zero: str) -> None:
    """Whoever steps a parameter has it whole, so nothing else need be pinned."""
    asked = make_problem(
        graph(), Cluster.local(2), precision="fp64", optimizer=BothSides,
        constraints=("sync=by_owner", f"zero={zero}", "dp_shard=2"),
    )  # fmt: skip
    plan = search_problem(asked)
    (stage,) = plan.stages
    assert stage.sync_form == "by_owner" and stage.zero == int(zero)
    losses, _ = run_ranks(2, train, plan)[0]
    assert losses == pytest.approx(alone(plain)[0], rel=1e-9)


class Late(torch.optim.Optimizer):
    """Looks at whole matrices from a late step on; an object has what it will need."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state.setdefault("sides", [])
                state["step"] = state.get("step", 0) + 1
                scale = p.grad.norm() if state["step"] > 1000 else 1.0
                p.add_(p.grad / scale, alpha=-group["lr"])


def test_what_it_looks_at_is_found_by_trying() -> None:
    """Forty steps of the second look as if each element were stepped by itself."""
    for kind in (BothSides, Late):
        assert reach(kind, {}, kind) is Reach.PARAMETER
