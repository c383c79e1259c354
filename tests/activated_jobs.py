"""Jobs with dropout after GELU, and alone."""

from functools import cache

import torch

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job


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
