"""Dropout masks belong to the sample, not to the layout: the same training under every plan."""

from functools import cache

import pytest
import torch

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks
from tests.dropout_jobs import alone, batch, build, graph, losses, plan_for


@pytest.mark.parametrize(
    ("world", "choice"),
    [
        (1, {"num_microbatches": 4}),
        (1, {"recompute": "full"}),
        (3, {"dp_replicate": 3}),
        (2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "overlap": "block"}),
        (2, {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
        (4, {"pp": 2, "stage_dp": (3, 1), "num_microbatches": 2, "recompute": "full"}),
    ],
)
def test_every_layout_drops_the_same(world, choice):
    plan = plan_for(world, **choice)
    for found in run_ranks(world, losses, plan, 0):
        assert found == pytest.approx(alone(), rel=1e-10)


class Activated(torch.nn.Module):
    """A layer as vision models have it: dropout of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 24), torch.nn.Linear(24, 6)
        self.act, self.drop = torch.nn.GELU(), torch.nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(self.act(self.up(x)))))


def activated():
    torch.manual_seed(0)
    return torch.nn.Sequential(Activated(), Activated()).double()


def squared(x, y):
    return torch.nn.functional.mse_loss(x, y)


def pairs(seed: int):
    return torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(seed)).double().unbind()


@cache
def activated_graph(kernels: tuple[str, ...]):
    return trace(activated(), pairs(0), squared, kernels=kernels)


def activated_losses(kernels: tuple[str, ...], world: int, choice) -> list[float]:
    given = activated_graph(kernels)
    problem = make_problem(given, Cluster.local(world), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    job = compile_job(
        activated(), plan, graph=given, optimizer="sgd", lr=0.1, loss_fn=squared, device="cpu"
    )
    found = [float(job.step(pairs(i))) for i in range(3)] + [float(job.eval(pairs(9)))]
    job.close()
    return found


@pytest.mark.parametrize(
    ("world", "choice"),
    [
        (1, {"num_microbatches": 4}),
        (3, {"dp_replicate": 3}),
        (2, {"pp": 2, "num_microbatches": 2, "recompute": "full"}),
    ],
)
def test_a_kernel_drops_what_dropout_alone_does(world, choice):
    fused = activated_graph(("bias_gelu",))
    assert [op.target for op in fused.ops].count("meshwright.bias_gelu_dropout.default") == 2
    wanted = activated_losses((), 1, {})
    for found in run_ranks(world, activated_losses, ("bias_gelu",), world, choice):
        assert found == pytest.approx(wanted, rel=1e-10)


def test_another_seed_drops_other_elements():
    assert losses(plan_for(1), 1)[0] != pytest.approx(alone()[0], rel=1e-6)


def test_each_step_drops_other_elements():
    job = compile_job(build(), plan_for(1), graph=graph(), optimizer="sgd", lr=0.0)
    first, second = (float(job.step(batch(0))) for _ in range(2))
    job.close()
    assert first != pytest.approx(second, rel=1e-6)
