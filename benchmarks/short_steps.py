"""Steps of 20 to 150 ms as predicted from `measure_local` alone, and as they were: processes of
this machine that share its cores.

python -m benchmarks.short_steps [--ranks 4] [--turns 8]

A perceptron and a small GPT train under plans of each kind. All jobs are in the same processes and
take turns of three steps, the first of which does not count. `step` is what a fifth and a half of
the steps were done in, as other work on the machine makes single steps longer and none shorter;
`cores` is what the processes used of them, in seconds of all cores: no step of these can be
shorter, whoever else is there. `others` is what other processes used of the machine meanwhile.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.running.disturbance import mark, others_share
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

WIDTH, HEADS, VOCABULARY, TOKENS = 128, 4, 1000, 64
Batch = tuple[Tensor, Tensor]


class Perceptron(nn.Module):
    """Six square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return functional.mse_loss(x, y)


class Layer(nn.Module):
    """Of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        split = self.into(self.before(x)).view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, tokens, WIDTH))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class SmallGPT(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


def _numbers() -> Batch:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(512, 512, generator=draw), torch.randn(512, 512, generator=draw).tanh()


def _words() -> Batch:
    draw = torch.Generator().manual_seed(1)
    shape = 16, TOKENS
    x, y = (torch.randint(0, VOCABULARY, shape, generator=draw) for _ in range(2))
    return x, y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "perceptron": (Perceptron, _numbers), "GPT": (SmallGPT, _words),
}  # fmt: skip


def choices(ranks: int) -> dict[str, dict[str, int]]:
    """Of plans, by name."""
    found = {
        "replicas": {"dp_replicate": ranks, "zero": 0},
        "replicas, 4 micro-batches": {"dp_replicate": ranks, "zero": 0, "num_microbatches": 4},
        "ZeRO 1": {"dp_shard": ranks, "zero": 1},
        "ZeRO 3": {"dp_shard": ranks, "zero": 3},
        "tensor parallel": {"tp": ranks},
        "pipeline, 4 micro-batches": {"pp": ranks, "num_microbatches": 4},
    }
    if ranks % 4 == 0:
        found["ZeRO 1, tensor parallel"] = {"dp_shard": ranks // 2, "tp": 2, "zero": 1}
    return found


@dataclass(frozen=True)
class Steps:
    """Of one job on one rank."""

    wall_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """Processor seconds."""


def run_jobs(plans: Mapping[tuple[str, str], Plan], turns: int) -> dict[tuple[str, str], Steps]:
    """Steps of all jobs in turns; every rank calls it."""
    torch.manual_seed(0)
    jobs = {
        key: compile_job(MODELS[key[0]][0](), plan, lr=0.01, device="cpu", check=False,
                         example_inputs=MODELS[key[0]][1]())
        for key, plan in plans.items()
    }  # fmt: skip
    found = {key: Steps() for key in jobs}
    for turn in range(turns + 2):
        for key, job in jobs.items():
            batch = MODELS[key[0]][1]()
            torch.distributed.barrier()
            for number in range(3):
                wall, busy = time.perf_counter(), time.process_time()
                job.step(batch)
                wall, busy = time.perf_counter() - wall, time.process_time() - busy
                if turn >= 2 and number:
                    found[key].wall_s.append(wall)
                    found[key].busy_s.append(busy)
    for job in jobs.values():
        job.close()
    return found


def plans_of(ranks: int, cluster: Cluster) -> dict[tuple[str, str], Plan]:
    """By model and name."""
    found = {}
    for name, (model, batch) in MODELS.items():
        problem = make_problem(trace(model(), batch()), cluster, precision="fp32")
        for kind, choice in choices(ranks).items():
            found[name, kind] = build_plan(problem, uniform_choice(problem, **choice))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    begun = mark()
    cluster = measure_local(given.ranks)
    measured = others_share(begun, mark())
    plans = plans_of(given.ranks, cluster)
    begun = mark()
    seen = run_ranks(given.ranks, run_jobs, plans, given.turns, timeout_s=1500)
    later = others_share(begun, mark())
    table = Table("model", "plan", "step, ms", "median", "cores", "predicted", "off", "band")
    for key, plan in plans.items():
        walls = sorted(seen[0][key].wall_s)
        quick, middle = walls[len(walls) // 5], walls[len(walls) // 2]
        busy = sum(sorted(one[key].busy_s)[len(walls) // 2] for one in seen)
        told = plan.predicted
        assert told
        table.add_row(
            *key, f"{1e3 * quick:.1f}", f"{1e3 * middle:.1f}",
            f"{1e3 * busy / min(given.ranks, os.cpu_count() or 1):.1f}", f"{1e3 * told.step_s:.1f}",
            f"{told.step_s / quick - 1:+.0%}", f"{told.error_band:.0%}",
        )  # fmt: skip
    Console(width=120).print(table)
    print(f"others used {measured:.0%} of the machine while it was measured, {later:.0%} later")


if __name__ == "__main__":
    main()
