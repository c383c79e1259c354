"""How well training goes whose averages arrive late (DaSGD), beside synchronous training, and
beside gradients of low rank (PowerSGD) that take as many bytes.

python -m benchmarks.late_averages [--steps 600] [--seeds 0 1 2]

Four Gloo processes train a small network on the digits of scikit-learn, 16 samples each a step, by
plain SGD at a rate of 0.2, as jobs of plans that differ in `sync` alone. Printed is what goes of a
gradient's bytes in a step, the accuracy on the samples left out (the last 397), seed by seed,
and the accuracy of synchronous training less that of each, in points, averaged over seeds.
"""

import argparse
from dataclasses import replace
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.sync import exchange_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

RANKS, EACH, TRAINED, LR = 4, 16, 1400, 0.2
CASES: dict[str, FormChoice | None] = {
    "synchronous": None,
    **{f"dasgd {name}": FormChoice(form="dasgd", settings=settings) for name, settings in {
        "every 4, delay 0": {"every": 4, "delay": 0},
        "every 4, delay 2, corrected": {"every": 4, "delay": 2},
        "every 4, delay 2, mix 0.75": {"every": 4, "delay": 2, "rule": "mix", "keep": 0.75},
        "every 4, delay 2, mix 0.25": {"every": 4, "delay": 2, "rule": "mix", "keep": 0.25},
        "every 4, delay 2, overwrite": {"every": 4, "delay": 2, "rule": "overwrite"},
        "every 8, delay 4, corrected": {"every": 8, "delay": 4},
        "every 8, delay 4, 4 fragments": {"every": 8, "delay": 4, "fragments": 4},
        "every 10, delay 4, corrected": {"every": 10, "delay": 4},
    }.items()},
    **{f"powersgd rank {rank}": FormChoice(form="powersgd", settings={"rank": rank, "gain": 1.0})
       for rank in (6, 5, 3, 2)},
}  # fmt: skip


class Digits(nn.Module):
    """Two layers, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 10)

    def scores(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.scores(x), y)


def model(seed: int) -> Digits:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Digits()


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    return x, torch.tensor(data.target)[order]


def graph() -> Graph:
    x, y = digits()
    return trace(model(0), (x[: RANKS * EACH], y[: RANKS * EACH]))


def planned(sync: FormChoice | None) -> Plan:
    problem = make_problem(graph(), Cluster.local(RANKS), precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=RANKS), predict=False)
    return replace(plan, stages=(replace(plan.stages[0], sync=sync),))


def sent_of(sync: FormChoice | None) -> float:
    """What goes in a step per byte of a gradient, on average."""
    settings = sync.settings if sync else {}
    if sync is None or "rank" not in settings:
        return 1.0 / float(settings.get("every", 1))
    shapes = tuple(Shaped(tuple(p.shape), 4 * p.numel(), 0.0) for p in model(0).parameters())
    found = exchange_of(planned(sync).stages[0], shapes).stated
    return found["left"] + found["right"]


def accuracies(steps: int, seeds: tuple[int, ...]) -> dict[str, list[float]]:
    """On one rank, of all cases; every rank calls it."""
    x, y = digits()
    found: dict[str, list[float]] = {name: [] for name in CASES}
    traced = graph()
    for name, sync in CASES.items():
        plan = planned(sync)
        for seed in seeds:
            own = model(seed)
            job = compile_job(
                own, plan, optimizer="sgd", lr=LR, device="cpu", graph=traced, check=False
            )
            draw = torch.Generator().manual_seed(100 + seed)
            for _ in range(steps):
                picked = torch.randint(0, TRAINED, (RANKS * EACH,), generator=draw)
                job.step((x[picked], y[picked]))
            job.sync_to()
            job.close()
            with torch.no_grad():
                right = own.scores(x[TRAINED:]).argmax(1) == y[TRAINED:]
            found[name].append(float(right.float().mean()))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    found = run_ranks(RANKS, accuracies, given.steps, tuple(given.seeds), timeout_s=3000)[0]
    table = Table(
        f"{given.steps} steps", "bytes", *(f"seed {seed}" for seed in given.seeds), "points lost"
    )
    usual = mean(found["synchronous"])
    for name, values in found.items():
        lost = 100 * (usual - mean(values))
        sent = f"{sent_of(CASES[name]):.3f}"
        table.add_row(name, sent, *(f"{value:.4f}" for value in values), f"{lost:+.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
