"""What K-FAC adds to a step, as predicted and as measured, on four Gloo processes of this machine.

python -m benchmarks.kfac_overhead [--width 512] [--layers 6] [--batch 512] [--turns 25]

A perceptron trains as jobs of plans that differ in `sync` alone: plain; K-FAC that preconditions
with what it has; that makes factors in each step; and inverses too; with owners (zero 1) and with
inverses sent to all (zero 0). All jobs are in the same processes and take turns, step by step. What
K-FAC adds is what its step takes longer than the plain one, each the shortest fifth of its turns at
most, as other work on the machine makes single steps longer and none shorter. `busy` is what
all ranks' processors were busy with in a step, shared out over the cores: a step takes that and
what it waits. `paired` is the other reading of the same steps, in which nothing is chosen: the
median of what a step takes longer than the plain one of the same turn, and between which two of
these differences the median lies in 95 of 100 such runs (order statistics). `told` is the same of
`plan.predicted`, on a cluster as it is measured first, once it is quiet. What other work there is
(the load) is printed before and after.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.disturbance import pace_s
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

RANKS = 4
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


Turn = tuple[float, float]
"""Seconds of a step by the clock, and of this rank's processors."""


def measured(sizes: Sizes, made: dict[str, Plan], turns: int) -> dict[str, list[Turn]]:
    """The steps of each job, turn by turn; every rank calls it."""
    data = batch(sizes)
    jobs = {
        name: compile_job(Perceptron(sizes), plan, lr=0.01, device="cpu", check=False,
                          example_inputs=data)
        for name, plan in made.items()
    }  # fmt: skip
    found: dict[str, list[Turn]] = {name: [] for name in jobs}
    for turn in range(turns + 2):
        for name, job in jobs.items():
            torch.distributed.barrier()
            began, busy = time.perf_counter(), time.process_time()
            job.step(data)
            if turn >= 2:  # the first make all that later ones may not
                took = time.perf_counter() - began, time.process_time() - busy
                found[name].append(took)
    for job in jobs.values():
        job.close()
    return found


def quiet_ms(seconds: Sequence[float]) -> float:
    """Milliseconds within which a fifth of the steps were done."""
    return 1e3 * sorted(seconds)[len(seconds) // 5]


def busy_ms(ranks: Sequence[Sequence[Turn]], cores: int) -> float:
    """The same of what all processors do in a step, shared out over the cores."""
    return quiet_ms([sum([busy for _, busy in turn]) / cores for turn in zip(*ranks, strict=True)])


def paired_ms(steps: Sequence[Turn], plain: Sequence[Turn]) -> tuple[float, float, float]:
    """Median of the differences within turns, in milliseconds, and the 95 % interval of it."""
    more = sorted([1e3 * (a - b) for (a, _), (b, _) in zip(steps, plain, strict=True)])
    n, rank, tail = len(more), 0, 0.0
    # The median is below the k-th smallest as often as n coins show fewer than k heads.
    while (tail := tail + comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    at = max(0, rank - 1)
    return median(more), more[at], more[-1 - at]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in (("width", 512), ("layers", 6), ("batch", 512), ("turns", 25)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    sizes = Sizes(given.width, given.layers, given.batch)
    before, pace = os.getloadavg()[0], pace_s()
    made = plans(sizes, measure_local(RANKS))
    took = run_ranks(RANKS, measured, sizes, made, given.turns, timeout_s=1500)
    cores = min(RANKS, len(os.sched_getaffinity(0)))
    step_ms = {name: quiet_ms([s for s, _ in took[0][name]]) for name in made}
    processor_ms = {name: busy_ms([own[name] for own in took], cores) for name in made}
    heads = (
        "step, ms",
        "busy",
        "told",
        "added",
        "busy",
        "told",
        "off",
        "paired",
        "from, to",
        "off",
    )
    table = Table("job", *heads)
    for name, plan in made.items():
        level = name.split(":")[0]
        assert plan.predicted and made[level].predicted
        step, told = step_ms[name], 1e3 * plan.predicted.step_s
        cells = [f"{step:.1f}", f"{processor_ms[name]:.1f}", f"{told:.1f}"]
        if name != level:
            added, busy = step - step_ms[level], processor_ms[name] - processor_ms[level]
            more = told - 1e3 * made[level].predicted.step_s
            mid, low, high = paired_ms(took[0][name], took[0][level])
            cells += [f"{added:.1f}", f"{busy:.1f}", f"{more:.1f}", f"{more / added - 1:+.0%}"]
            cells += [f"{mid:.1f}", f"{low:.1f} to {high:.1f}", f"{more / mid - 1:+.0%}"]
        table.add_row(name, *cells)
    Console(width=140).print(table)
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after (with four processes); a loop "
          f"took {1e3 * pace:.1f} and {1e3 * pace_s():.1f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
