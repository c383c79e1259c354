"""Factors of K-FAC on two processes beside those of curvlinops, on one batch.

PYTHONPATH=FOLDER python -m benchmarks.kfac_oracle

FOLDER has curvlinops-for-pytorch 3.0.1 and what it reads (pip install --no-deps --target FOLDER
curvlinops-for-pytorch==3.0.1 einops einconv linear_operator jaxtyping wadler-lindig). Its empirical
Fisher is taken as a whole matrix, layer by layer, and compared with the Kronecker product of our
two running means after one step, in float64. Printed is the largest difference by the largest
value.
"""

import argparse
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

RANKS = 2


class Scores(nn.Module):
    """A convolution and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
        self.second, self.head = nn.Linear(27, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).flatten(1)
        found: Tensor = self.head(torch.tanh(self.second(x)))
        return found


class Loss(nn.Module):
    """Of the scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = Scores().double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.scores(x), y)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(12, 2, 6, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(4, (12,), generator=draw)


def ours() -> dict[str, list[Tensor]]:
    """Means of what each layer read, and of its gradients; every rank calls it."""
    graph = trace(Loss(), batch())
    problem = make_problem(graph, Cluster.local(RANKS), precision="fp64", optimizer="sgd")
    choice = uniform_choice(problem, dp_replicate=RANKS, num_microbatches=2)
    plan = build_plan(problem, choice, predict=False)
    stages = (replace(plan.stages[0], sync=FormChoice(form="kfac")),)
    job = compile_job(Loss(), replace(plan, stages=stages), lr=0.1, device="cpu", check=False,
                      example_inputs=batch())  # fmt: skip
    job.step(batch())
    state = job.parts.stages[0].sync.state()
    job.close()
    names = [key.removeprefix("mean 0 ") for key in state if key.startswith("mean 0 ")]
    return {name: [state[f"mean {n} {name}"] for n in (0, 1)] for name in names}


def theirs() -> dict[str, Tensor]:
    """The empirical Fisher of each weight [values, values]."""
    kind = import_module("curvlinops").KFACLinearOperator
    model, (x, y) = Loss().scores, batch()
    found = {}
    for name, weight in model.named_parameters():
        made = kind(
            model, nn.CrossEntropyLoss(), [weight], [(x, y)], fisher_type="empirical",
            kfac_approx="expand", check_deterministic=False,
        )  # fmt: skip
        eye = torch.eye(weight.numel(), dtype=torch.float64)
        found[f"scores.{name}"] = made @ eye
    return found


def main() -> None:
    """Prints the differences."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    means = run_ranks(RANKS, ours)[0]
    for name, whole in theirs().items():
        read, gradients = means[name]
        product = torch.kron(gradients, read)
        scale = float((product * whole).sum() / (whole * whole).sum())
        off = float((product - whole * scale).abs().max() / product.abs().max())
        print(f"{name}: ours is {scale:.12g} times theirs, and {off:.2e} off that")


if __name__ == "__main__":
    main()
