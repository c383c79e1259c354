"""Steps of a mixture whose tokens crowd on some experts: what is predicted beside what is measured.

python -m benchmarks.route_skew [--exponents 0 0.5 1 1.5] [--steps 9] [--rounds 3] [--width 256]
    [--inner 1024]

Two Gloo processes have half of the experts each, and samples of their own. Which experts a token
picks is drawn once for each word, the i-th expert in proportion to i to the power of minus the
exponent, so that the first process has most of the work. Where tokens go is counted
(`mw.count_routes`), and speeds are those of this machine (`measure_local`), whoever else uses it:
both are told in processor time. Jobs of all exponents take turns, step by step; a step is what its
busiest process takes, for which the others wait. Each round measures the machine anew and then
trains: the table has medians of rounds, of predictions and of steps, and the lowest and highest
error of a round.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwright as mw
from meshwright.costmodel.estimate import estimate
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.route_counts import RouteCounts
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

RANKS, BATCH, LENGTH, WORDS, LAYERS, EXPERTS, PICKED = 2, 8, 256, 512, 2, 8, 2
PINS = (
    "ep=2", "samples=own", "place *.experts_* ep=S(0)", "num_microbatches=1", "zero=0",
    "recompute=none", "overlap=none",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of each layer."""

    width: int
    inner: int


def _dispatched(self: "Crowded", x: Tensor, words: Tensor) -> Tensor:
    """What a layer computes, for the trace."""
    index = self.picks[words]
    weights = x.new_ones(index.shape) / PICKED
    return mw.mix_experts(x, index, weights, self.experts_up, self.experts_down, act="gelu")


@mw.experts_by(_dispatched)
class Crowded(nn.Module):
    """A layer of experts; each word goes where `picks` says."""

    def __init__(self, size: Size, picks: Tensor) -> None:
        super().__init__()
        up, down = (EXPERTS, size.inner, size.width), (EXPERTS, size.width, size.inner)
        self.experts_up = nn.Parameter(torch.randn(up) * size.width**-0.5)
        self.experts_down = nn.Parameter(torch.randn(down) * size.inner**-0.5)
        self.register_buffer("picks", picks)
        self.picks: Tensor

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            sample, token, _ = torch.where(self.picks[words] == expert)
            hidden = F.gelu(x[sample, token] @ self.experts_up[expert].T)
            made = hidden @ self.experts_down[expert].T / PICKED
            out = out.index_put((sample, token), made, accumulate=True)
        return out


class Mixture(nn.Module):
    """Layers of experts between a table and a head."""

    def __init__(self, size: Size, exponent: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        shares = torch.arange(1.0, EXPERTS + 1) ** -exponent
        drawn = torch.Generator().manual_seed(1)
        picks = torch.multinomial(shares.expand(WORDS, EXPERTS), PICKED, generator=drawn)
        self.table = nn.Embedding(WORDS, size.width)
        self.layers = nn.ModuleList(Crowded(size, picks) for _ in range(LAYERS))
        self.head = nn.Linear(size.width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = x + layer(x, words)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def batch() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    return {"words": words}


def planned(graph: Graph, cluster: Cluster, routes: RouteCounts) -> Plan:
    """The best plan of two ranks of experts, where tokens go as was counted."""
    asked = tuple(parse_constraint(pin) for pin in PINS)
    problem = make_problem(
        graph, cluster, precision="fp32", optimizer="sgd", constraints=asked, routes=routes
    )
    return search_problem(problem)


def train(
    size: Size, graph: Graph, plans: Sequence[tuple[float, Plan]], steps: int
) -> list[list[float]]:
    """Processor seconds of each step, by exponent; the first one is left out."""
    torch.set_num_threads(1)
    jobs = [
        compile_job(
            Mixture(size, exponent), plan, optimizer="sgd", lr=1e-3, device="cpu", graph=graph,
            check=False,
        )
        for exponent, plan in plans
    ]  # fmt: skip
    data, found = batch(), [list[float]() for _ in jobs]
    for _ in range(steps + 1):
        for job, seconds in zip(jobs, found, strict=True):
            begun = time.process_time()
            float(job.step(data))
            seconds.append(time.process_time() - begun)
    return [seconds[1:] for seconds in found]


@dataclass(frozen=True)
class Round:
    """Of one exponent."""

    predicted_s: float
    took_s: float
    load: float
    """Of the busiest rank over the mean."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.took_s - 1


def one_round(size: Size, exponents: Sequence[float], steps: int) -> list[Round]:
    """Measures the machine, plans for it and trains; by exponent."""
    machine = measure_local(RANKS)
    graph = mw.trace(Mixture(size, 0.0), batch())
    plans: list[tuple[float, Plan]] = []
    for exponent in exponents:
        routes = mw.count_routes(Mixture(size, exponent), [batch()])
        found = planned(graph, machine, routes)
        # What differs is where tokens go: all train by the first one's plan.
        plans.append((exponent, replace(plans[0][1], routing=found.routing) if plans else found))
    ranks = run_ranks(RANKS, train, size, graph, plans, steps, timeout_s=300.0)
    return [
        Round(
            estimate(graph, machine, plan)[0].step_s,
            max(map(median, seconds)),
            max((one.load(RANKS) for one in plan.routing), default=1.0),
        )
        for (_, plan), *seconds in zip(plans, *ranks, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exponents", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--inner", type=int, default=1024)
    given = parser.parse_args()
    size = Size(given.width, given.inner)
    rounds = [one_round(size, given.exponents, given.steps) for _ in range(given.rounds)]
    print(
        "| exponent | busiest rank's work | predicted, ms | measured, ms | off | in rounds | over "
        "the first step: predicted | measured | off |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for exponent, seen in zip(given.exponents, zip(*rounds, strict=True), strict=True):
        step_s, took_s = median(x.predicted_s for x in seen), median(x.took_s for x in seen)
        first = first or (step_s, took_s)
        more, took_more = step_s / first[0], took_s / first[1]
        errors = [x.error for x in seen]
        print(
            f"| {exponent:g} | {seen[0].load:.2f} | {step_s * 1e3:.0f} | {took_s * 1e3:.0f} | "
            f"{step_s / took_s - 1:+.1%} | {min(errors):+.1%} to {max(errors):+.1%} | "
            f"{more:.2f} | {took_more:.2f} | {more / took_more - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
