"""Optimizers that do not step each element by itself: exact where parameters are whole, else
refused."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.forms.trying import KNOWN, Reach, _tried, reach
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.choice import check_choice
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from meshwright.testing.split_all import split_all

Params = Any


class Plain(torch.optim.Optimizer):
    """Steps each element by what it makes of the gradient; settings as torch has them."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def change(self, p: Tensor, grad: Tensor) -> Tensor:
        self.state[p]["mean"] = mean = self.state[p].get("mean", 0 * grad) * 0.9 + grad * 0.1
        return mean.sign()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, p.grad))


class Lars(Plain):
    def change(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad * (p.norm() + 0.1) / (grad.norm() + 1e-9)


class Late(Plain):
    """Looks at the whole parameter every 100 steps only."""

    def change(self, p: Tensor, grad: Tensor) -> Tensor:
        self.state[p]["count"] = count = self.state[p].get("count", 0) + 1
        return grad if count % 100 else grad / grad.norm()


class Clipped(Plain):
    """The norm of all gradients, if it is large."""

    def change(self, p: Tensor, grad: Tensor) -> Tensor:
        every = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        norm = torch.stack([g.norm() for g in every]).norm()
        return grad / norm.clamp(min=0.5)


class Shaken(Plain):
    def change(self, p: Tensor, grad: Tensor) -> Tensor:
        return grad + torch.randn_like(grad)


FOUND = {
    Plain: Reach.ELEMENT,
    torch.optim.Adafactor: Reach.PARAMETER,
    torch.optim.Muon: Reach.PARAMETER,
    Lars: Reach.PARAMETER,
    Late: Reach.PARAMETER,
    Clipped: Reach.GROUP,
    Shaken: Reach.CHANCE,
}


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_trying_says_what_a_step_depends_on(kind: Any, lr: float) -> None:
    assert reach(kind, {"lr": lr}, partial(kind, lr=lr)) is FOUND[kind]


def test_those_of_torch_that_are_known_are_what_trying_finds() -> None:
    assert {kind: _tried(kind) for kind in KNOWN} == dict.fromkeys(KNOWN, Reach.ELEMENT)


class Net(nn.Module):
    """Matrices alone: Muon takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step)).double().unbind()


@cache
def graph() -> Graph:
    return trace(net(), batch(0), F.mse_loss)


def plan(world: int, **choice: Any) -> Plan:
    problem = make_problem(graph(), Cluster.local(world), precision="fp64", optimizer="adamw")
    if tp := choice.get("tp"):
        problem.solved[model_mesh({"tp": tp}), ""] = split_all(graph(), tp)
    return build_plan(problem, uniform_choice(problem, **choice), predict=False)


def asked(kind: Any, given: Plan) -> None:
    """As a job asks, of an instance and of a callable."""
    model = net()
    made = kind(model.parameters())
    check_choice(made, made, given, graph(), model)
    check_choice(kind, kind([{"params": list(net().parameters())}]), given, graph(), model)


CUT = [(2, {"dp_shard": 2, "zero": 1}), (2, {"dp_shard": 2, "zero": 3}), (2, {"tp": 2})]


@pytest.mark.parametrize(("world", "choice"), CUT)
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, Lars, Clipped])
def test_parts_of_parameters_are_refused(kind: Any, world: int, choice: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"(zero=\d|over tp as).*zero=0 and tp=1"):
        asked(kind, plan(world, **choice))


def test_other_plans_and_optimizers_are_not() -> None:
    for world, choice in CUT:
        asked(Plain, plan(world, **choice))
    for kind in (torch.optim.Adafactor, Lars):
        asked(kind, plan(2, pp=2, num_microbatches=2))
    asked(Clipped, plan(2, dp_replicate=2))
    asked(Shaken, plan(1))


def test_what_couples_parameters_is_refused_across_stages() -> None:
    with pytest.raises(PlanError, match="other parameters too, but 2 stages hold different"):
        asked(Clipped, plan(2, pp=2, num_microbatches=2))


def test_what_draws_numbers_is_refused_on_several_ranks() -> None:
    with pytest.raises(PlanError, match="draws random numbers"):
        asked(Shaken, plan(2, dp_replicate=2))


def test_what_wants_a_closure_is_refused() -> None:
    with pytest.raises(PlanError, match="LBFGS wants a closure"):
        asked(torch.optim.LBFGS, plan(1))


EXACT = (torch.optim.Adafactor, torch.optim.Muon, Lars, Clipped)


def trained(kind: Any, given: Plan) -> dict[str, Tensor]:
    job = compile_job(net(), given, graph=graph(), loss_fn=F.mse_loss, optimizer=kind, device="cpu")
    for step in range(3):
        job.step(batch(step))
    found = full_state(job)
    job.close()
    return found


def all_trained(given: Plan) -> list[dict[str, Tensor]]:
    return [trained(kind, given) for kind in EXACT]


def by_hand() -> list[dict[str, Tensor]]:
    found = []
    for kind in EXACT:
        model = net()
        made = kind(model.parameters())
        for step in range(3):
            made.zero_grad()
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            made.step()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    return found


def test_with_whole_parameters_they_are_exact() -> None:
    wanted = alone(by_hand)
    found = run_ranks(2, all_trained, plan(2, dp_replicate=2))[0]
    for kind, mine, theirs in zip(EXACT, found, wanted, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(
                mine[name], value, rtol=1e-9, atol=1e-9, msg=f"{kind.__name__} {name}"
            )


def over_its_own(given: Plan) -> str:
    model = net()
    try:
        compile_job(
            model, given, graph=graph(), loss_fn=F.mse_loss, device="cpu",
            optimizer=lambda params: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip
    except PlanError as error:
        return str(error)
    return ""


def test_an_optimizer_over_other_tensors_is_refused() -> None:
    assert "tensors of its own" in alone(over_its_own, plan(1))
