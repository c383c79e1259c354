"""scikit-learn's digits as sequences of 8 rows, learnt by alternating directions, Adam and SGD.

python -m benchmarks.admm_digits [--hidden 32 64] [--seeds 0 1 2] [--iterations 100] [--ranks 2]

A recurrent network of torch (tanh, a linear layer on the last state) in float64, 1,400 samples to
learn from and 397 to judge by. Alternating directions run as a job of a plan on Gloo processes that
have unequal shares. Adam and SGD are plain PyTorch with all samples in each step, as many steps,
and the best learning rate of a sweep by their last loss; SGD also runs at 10 times its best.
"""

import argparse
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.forms.methods import with_method
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.by_method import by_method
from meshwright.testing.recurrent_nets import LastState
from meshwright.testing.spawn import run_ranks

LEARNT = 1400
RATES = {"adam": (0.003, 0.01, 0.03), "sgd": (0.03, 0.1, 0.3, 1.0, 3.0)}
TIMEOUT_S = 1500
Curve = tuple[list[float], float]
"""What was made smaller, step by step, and the share of new samples that is right at the end."""


def net(hidden: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return LastState(hidden).double()


@cache
def digit_rows() -> tuple[Tensor, Tensor]:
    """All digits in one fixed order: [1797, 8, 8] from 0 to 1 in float64, and labels."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x / 16.0).view(-1, 8, 8)[order], torch.tensor(y)[order]


def samples(count: int = LEARNT) -> tuple[Tensor, Tensor]:
    x, y = digit_rows()
    return x[:count], y[:count]


def right(model: nn.Module) -> float:
    """The share of samples from `LEARNT` on whose class the network finds."""
    x, y = digit_rows()
    with torch.no_grad():
        return float((model(x[LEARNT:]).argmax(1) == y[LEARNT:]).double().mean())


def plan_of(hidden: int, ranks: int, count: int = LEARNT, **settings: float) -> Plan:
    """Of unequal shares: each rank has twice as many samples as the one after it."""
    graph = trace(net(hidden, 0), samples(count), F.cross_entropy)
    problem = make_problem(graph, Cluster.local(ranks), precision="fp64")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=ranks), predict=False)
    shares = [count * 2**n // (2**ranks - 1) for n in reversed(range(ranks))]
    shares[0] += count - sum(shares)
    stage = replace(plan.stages[0], batch_shares=tuple(shares))
    return with_method(replace(plan, stages=(stage,)), "admm", **settings)


def alternating(plan: Plan, hidden: int, seed: int, iterations: int) -> Curve:
    """Every rank calls this."""
    model = net(hidden, seed)
    job = by_method(model, plan, samples(plan.global_batch_size), loss_fn=F.cross_entropy)
    values = [float(job.step()) for _ in range(iterations)]
    job.sync_to()
    job.close()
    return values, right(model)


def stepped(kind: str, lr: float, hidden: int, seed: int, steps: int) -> Curve:
    """By gradients of all samples."""
    model = net(hidden, seed)
    optimizer = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind](model.parameters(), lr=lr)
    x, y = samples()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, right(model)


def one_process(kind: str, lr: float, hidden: int, seed: int, steps: int) -> Curve:
    """`stepped` in a process of its own, on a machine that may be busy."""
    found: Curve = run_ranks(1, stepped, kind, lr, hidden, seed, steps, timeout_s=TIMEOUT_S)[0]
    return found


def best(kind: str, hidden: int, seed: int, steps: int) -> tuple[float, Curve]:
    """The learning rate of the sweep with the least loss at the end, and its run."""
    runs = {lr: one_process(kind, lr, hidden, seed, steps) for lr in RATES[kind]}
    lr = min(runs, key=lambda lr: runs[lr][0][-1] if runs[lr][0][-1] == runs[lr][0][-1] else 1e30)
    return lr, runs[lr]


def rises(values: list[float]) -> int:
    """Steps that ended higher than the one before."""
    return sum(b > a for a, b in pairwise(values))


def main() -> None:
    """Prints the table, and its rows as they are found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stale", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    table = Table("hidden", "seed", "method", "first", "last", "steps that rose", "right")
    for hidden in given.hidden:
        for seed in given.seeds:
            found: dict[str, Curve] = {}
            for stale in given.stale:
                args = plan_of(hidden, given.ranks, stale=stale), hidden, seed, given.iterations
                found[f"alternating, sums {stale} late"] = run_ranks(
                    given.ranks, alternating, *args, timeout_s=TIMEOUT_S
                )[0]
            for kind in RATES:
                lr, found_best = best(kind, hidden, seed, given.iterations)
                found[f"{kind}, {lr:g}"] = found_best
            wild = 10 * lr
            found[f"sgd, {wild:g}"] = one_process("sgd", wild, hidden, seed, given.iterations)
            for name, (values, share) in found.items():
                row = f"{values[0]:.4f}", f"{values[-1]:.4f}", f"{rises(values)}", f"{share:.3f}"
                table.add_row(f"{hidden}", f"{seed}", name, *row)
                print(hidden, seed, name, *row, sep=" | ", flush=True)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
