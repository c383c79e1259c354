"""What K-FAC adds to a step, as predicted and as measured, on four Gloo processes of this machine.

python -m benchmarks.kfac_overhead [--width 512] [--layers 6] [--batch 512] [--turns 6] [--rounds 4]

A perceptron trains as jobs of plans that differ in `sync` alone: plain; K-FAC that preconditions
with what it has; that makes factors in each step; and inverses too; with owners (zero 1) and with
inverses sent to all (zero 0). All jobs are in the same processes and take turns, step by step. What
K-FAC adds is the median of what its step takes longer than the plain one of the same turn; beside
it, between which two of these differences the median lies in 95 of 100 such runs (order
statistics). `told` is the same of `plan.predicted`. A machine that others share changes within
seconds: so it is measured before each round of turns and after the last, and what is told is the
mean over these clusters, as what is measured is over these rounds; `first` is told on the first
one alone, and the least and the most are beside it.

How near a prediction can be is measured too: each job is there twice, and `again` is what the
second ones say, of the same thing in the same turns. The lines below the table say how many pairs
of two readings of one thing are within 10 % of each other. What other work there is (the load) is
printed before and after.
"""

import argparse
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from statistics import mean, median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.running.disturbance import pace_s
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

RANKS = 4
TIMES = 2
"""That each job is there."""
NEAR = 0.1
NEVER = 2**20
KINDS = {
    "preconditions": {"factor_update_steps": NEVER, "inv_update_steps": NEVER},
    "factors": {"inv_update_steps": NEVER},
    "factors, inverses": {},
}
LEVELS = {
    "owners": {"dp_shard": RANKS, "zero": 1},
    "all": {"dp_replicate": RANKS, "zero": 0},
}


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    width: int
    layers: int
    batch: int


class Perceptron(nn.Module):
    """Layers of equal width."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Linear(sizes.width, sizes.width) for _ in range(sizes.layers)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def batch(sizes: Sizes) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = sizes.batch, sizes.width
    return torch.randn(shape, generator=draw), torch.randn(shape, generator=draw).tanh()


def plans(sizes: Sizes, cluster: Cluster) -> dict[str, Plan]:
    """Of each level, plain and with each kind of K-FAC."""
    graph = trace(Perceptron(sizes), batch(sizes))
    problem = make_problem(graph, cluster, precision="fp32", optimizer="sgd_momentum")
    found = {}
    for level, choice in LEVELS.items():
        plain = build_plan(problem, uniform_choice(problem, **choice))
        found[level] = plain
        for kind, settings in KINDS.items():
            sync = FormChoice(form="kfac", settings={**settings, "damping": 0.03})
            stages = (replace(plain.stages[0], sync=sync),)
            plan = rehash(replace(plain, stages=stages, predicted=None))
            found[f"{level}: {kind}"] = replace(plan, predicted=predict_plan(problem, plan))
    return found


Steps = dict[str, tuple[list[float], ...]]
"""Of each job, by how many times it is there: seconds of its steps, turn by turn."""


def measured(sizes: Sizes, made: dict[str, Plan], turns: int) -> Steps:
    """The steps of all jobs, each of which is there twice; every rank calls it."""
    data = batch(sizes)
    jobs = [
        {
            name: compile_job(
                Perceptron(sizes), plan, lr=0.01, device="cpu", check=False, example_inputs=data
            )
            for name, plan in made.items()
        }
        for _ in range(TIMES)
    ]
    found: Steps = {name: tuple([] for _ in jobs) for name in made}
    for turn in range(turns + 2):
        for number, own in enumerate(jobs):
            for name, job in own.items():
                torch.distributed.barrier()
                began = time.perf_counter()
                job.step(data)
                if turn >= 2:  # the first make all that later ones may not
                    found[name][number].append(time.perf_counter() - began)
    for own in jobs:
        for job in own.values():
            job.close()
    return found


def paired_ms(steps: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Median of the differences within turns, in milliseconds, and the 95 % interval of it."""
    more = sorted([1e3 * (a - b) for a, b in zip(steps, plain, strict=True)])
    n, rank, tail = len(more), 0, 0.0
    # The median is below the k-th smallest as often as n coins show fewer than k heads.
    while (tail := tail + comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    at = max(0, rank - 1)
    return median(more), more[at], more[-1 - at]


def told_ms(plan: Plan, plain: Plan) -> float:
    """What a plan is predicted to take longer than the plain one."""
    assert plan.predicted and plain.predicted
    return 1e3 * (plan.predicted.step_s - plain.predicted.step_s)


@dataclass(frozen=True)
class Added:
    """What one kind of K-FAC adds to a step, in milliseconds."""

    told: tuple[float, ...]
    """By cluster."""
    found: tuple[float, float]
    """By which of the two jobs."""
    between: tuple[float, float]
    """Of the first."""

    @property
    def cells(self) -> list[str]:
        told, (first, again), (low, high) = mean(self.told), self.found, self.between
        return [
            f"{self.told[0]:.1f}", f"{told:.1f}", f"{min(self.told):.1f} to {max(self.told):.1f}",
            f"{first:.1f}", f"{again:.1f}", f"{low:.1f} to {high:.1f}", f"{told / first - 1:+.0%}",
        ]  # fmt: skip


def added(found: Steps, name: str, level: str, told: Iterable[float]) -> Added:
    """Reads both jobs of a kind."""
    pairs = zip(found[name], found[level], strict=True)
    (first, low, high), (second, *_) = (paired_ms(steps, plain) for steps, plain in pairs)
    return Added(tuple(told), (first, second), (low, high))


def shares(rows: Sequence[Added]) -> list[str]:
    """How many rows are told within the bar, and how many pairs of one thing's readings are."""
    of = {
        "told beside found": [(mean(r.told), r.found[0]) for r in rows],
        "told beside found again": [(mean(r.told), r.found[1]) for r in rows],
        "told first beside found": [(r.told[0], r.found[0]) for r in rows],
        "found again beside found": [(r.found[1], r.found[0]) for r in rows],
        "told on one cluster beside another of this machine": [
            pair for r in rows for pair in combinations(r.told, 2)
        ],
    }
    lines = [
        f"{what}: {sum(abs(one / other - 1) <= NEAR for one, other in pairs)} of {len(pairs)} "
        f"within {NEAR:.0%}"
        for what, pairs in of.items()
    ]
    within = sum(r.between[0] <= mean(r.told) <= r.between[1] for r in rows)
    return [*lines, f"told within the interval of what is found: {within} of {len(rows)}"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers = ("width", 512), ("layers", 6), ("batch", 512), ("turns", 6), ("rounds", 4)
    for name, value in numbers:
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sizes = Sizes(given.width, given.layers, given.batch)
    before, pace = os.getloadavg()[0], pace_s()
    of_clusters = [plans(sizes, measure_local(RANKS))]
    found: Steps = {name: tuple([] for _ in range(TIMES)) for name in of_clusters[0]}
    for _ in range(given.rounds):
        args = measured, sizes, of_clusters[0], given.turns
        for name, own in run_ranks(RANKS, *args, timeout_s=1500)[0].items():
            for steps, more in zip(found[name], own, strict=True):
                steps += more
        of_clusters.append(plans(sizes, measure_local(RANKS)))
    table = Table("job", "step, ms", "told", "added: told first", "told", "from, to", "found",
                  "again", "from, to", "off")  # fmt: skip
    rows = []
    for name in found:
        level = name.split(":")[0]
        steps_s = [plan.predicted.step_s for own in of_clusters if (plan := own[name]).predicted]
        cells = [f"{1e3 * median(found[name][0]):.1f}", f"{1e3 * mean(steps_s):.1f}"]
        if name != level:
            told = (told_ms(own[name], own[level]) for own in of_clusters)
            rows.append(added(found, name, level, told))
            cells += rows[-1].cells
        table.add_row(name, *cells)
    Console(width=140).print(table)
    print("\n".join(shares(rows)))
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after (with four processes); a loop "
          f"took {1e3 * pace:.1f} and {1e3 * pace_s():.1f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
