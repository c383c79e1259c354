"""Steps until scikit-learn's digits are learnt, by K-FAC with owners and by plain SGD.

python -m benchmarks.kfac_digits [--seeds 0 1 2] [--most 400]

Two Gloo processes train a perceptron 64-128-64-10 with tanh on batches of 128, as jobs of plans
that differ in `sync` alone, with a momentum of 0.9 and a sweep of learning rates. Every five steps
the loss on all 1,797 samples is taken; the first step at which it is below 0.05 is printed, seed by
seed, and the milliseconds of a step.
"""

import argparse
import time
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

RANKS, BATCH, GOAL, EVERY = 2, 128, 0.05, 5
RATES = {"kfac": (0.01, 0.03, 0.1, 0.3, 0.5), "sgd": (0.03, 0.1, 0.3, 0.5, 0.7)}
SETTINGS = {"damping": 0.003, "kl_clip": 1e-3, "inv_update_steps": 5}


@dataclass(frozen=True)
class Learnt:
    """One run."""

    steps: int
    """Until the goal; 0: not within all of them."""
    step_s: float
    """Median of a step."""


class Perceptron(nn.Module):
    """64-128-64-10."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.cross_entropy(self.head(x), y)


def digits() -> tuple[Tensor, Tensor]:
    """All samples [1797, 64] from 0 to 1, and their labels."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)


def model(seed: int) -> Perceptron:
    torch.manual_seed(seed)
    return Perceptron()


def plan_of(method: str, lr: float) -> Plan:
    """Of two replicas; K-FAC is told the learning rate for its limit."""
    x, y = digits()
    graph = trace(model(0), (x[:BATCH], y[:BATCH]))
    problem = make_problem(graph, Cluster.local(RANKS), precision="fp32", optimizer="sgd_momentum")
    plan = build_plan(problem, uniform_choice(problem, dp_shard=RANKS, zero=1), predict=False)
    if method == "sgd":
        return plan
    choice = FormChoice(form="kfac", settings={**SETTINGS, "lr": lr})
    return replace(plan, stages=(replace(plan.stages[0], sync=choice),))


def learn(method: str, lr: float, seed: int, most: int) -> Learnt:
    """Every rank calls this."""
    x, y = digits()
    job = compile_job(
        model(seed), plan_of(method, lr), lr=lr, device="cpu", check=False,
        example_inputs=(x[:BATCH], y[:BATCH]),
    )  # fmt: skip
    plain, order = model(seed), torch.Generator().manual_seed(seed)
    seconds, found = [], 0
    for step in range(1, most + 1):
        rows = torch.randperm(len(x), generator=order)[:BATCH]
        began = time.perf_counter()
        job.step((x[rows], y[rows]))
        seconds.append(time.perf_counter() - began)
        if step % EVERY == 0 and _loss(full_state(job), plain, x, y) < GOAL:
            found = step
            break
    job.close()
    return Learnt(found, median(seconds))


def _loss(state: dict[str, Tensor], plain: Perceptron, x: Tensor, y: Tensor) -> float:
    """On all samples, on every rank."""
    loss = torch.zeros(())
    if state:  # only rank 0 has it
        plain.load_state_dict(state)
        with torch.no_grad():
            loss = plain(x, y)
    torch.distributed.broadcast(loss, 0)
    return float(loss)


def all_runs(seeds: tuple[int, ...], most: int) -> dict[tuple[str, float], list[Learnt]]:
    """Each method with each learning rate and seed."""
    return {
        (method, lr): [learn(method, lr, seed, most) for seed in seeds]
        for method, rates in RATES.items() for lr in rates
    }  # fmt: skip


def best(found: dict[tuple[str, float], list[Learnt]], method: str) -> float:
    """Mean steps of the learning rate with fewest that reached the goal with every seed."""
    means = [
        mean(run.steps for run in runs) for (name, _), runs in found.items()
        if name == method and all(run.steps for run in runs)
    ]  # fmt: skip
    return min(means)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--most", type=int, default=400)
    given = parser.parse_args()
    found = run_ranks(RANKS, all_runs, tuple(given.seeds), given.most, timeout_s=3000)[0]
    table = Table("method", "lr", *(f"seed {seed}" for seed in given.seeds), "ms a step")
    for (method, lr), runs in found.items():
        steps = (str(run.steps or f"> {given.most}") for run in runs)
        table.add_row(method, f"{lr}", *steps, f"{1e3 * median(r.step_s for r in runs):.1f}")
    Console().print(table)
    kfac, sgd = best(found, "kfac"), best(found, "sgd")
    print(f"best: K-FAC {kfac:.0f} steps, SGD {sgd:.0f}: {sgd / kfac:.2f} times fewer")


if __name__ == "__main__":
    main()
