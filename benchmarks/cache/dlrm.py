"""A DLRM whose tables are on the host with a cache, beside the same without: steps in turns.

python -m benchmarks.cache.dlrm [--share 0.015] [--link 2GB/s] [--rounds 20] [--policy frequency]

One process, 8 tables of 125,000 rows of 32 numbers, Zipf 1.05, batches of 2,048, SGD in float32;
networks of MLPerf's DLRM (bottom 512-256, top 1024-1024-512-256), with `--small` of the Kaggle one
(512-256 both). The link to the host is made as slow as said. Contenders take turns, round by round,
so that what else runs on the machine slows all: a job of ours with a cache; the same without, whose
tables have dense gradients and are stepped whole; and plain PyTorch with `sparse=True`, which steps
the rows that occur, on tables in one memory. Prints each one's median step, the median over rounds
of the ratio of speeds, hits, and how far losses are from each other.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from meshwright.forms.host_link import shaped
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import parse_quantity
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.rows import count_rows
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.ids import zipf_batches

TABLES, ROWS, WIDTH, BATCH, DENSE = 8, 125_000, 32, 2048, 13
STEPS = 4
"""Of each contender in a round."""
LR = 0.05
Batch = tuple[Tensor, ...]


TOP = [1024, 1024, 512, 256]
SMALL_TOP = [512, 256]


def _layers(widths: Sequence[int]) -> Iterator[nn.Module]:
    for low, high in pairwise(widths):
        yield nn.Linear(low, high)
        yield nn.ReLU()


class Dlrm(nn.Module):
    """Tables, a network of dense features, products of all pairs, and a network on top (Naumov et
    al. 2019)."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=sparse) for _ in range(TABLES))
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, WIDTH), nn.ReLU(),
        )  # fmt: skip
        pairs = (TABLES + 1) ** 2
        self.top = nn.Sequential(*_layers((pairs + WIDTH, *TOP)), nn.Linear(TOP[-1], 1))

    def forward(self, dense: Tensor, clicked: Tensor, *ids: Tensor) -> Tensor:
        """Returns the loss of a batch."""
        low = self.bottom(dense)
        found = [low, *(table(own) for table, own in zip(self.tables, ids, strict=True))]
        each = torch.stack(found, dim=1)
        products = torch.bmm(each, each.transpose(1, 2)).flatten(1)
        score = self.top(torch.cat([low, products], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(score, clicked)


class Eight(Dlrm):
    """With as many arguments as there are tables, which a trace asks for."""

    def forward(  # type: ignore[override]
        self, dense: Tensor, clicked: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor,
        e: Tensor, f: Tensor, g: Tensor, h: Tensor,
    ) -> Tensor:  # fmt: skip
        """Returns the loss of a batch."""
        return super().forward(dense, clicked, a, b, c, d, e, f, g, h)


def made(*, sparse: bool = False) -> Eight:
    """Makes the model, with the same numbers each time."""
    torch.manual_seed(0)
    return Eight(sparse=sparse)


def batches(count: int) -> list[Batch]:
    """Returns batches of dense features, labels, and ids of each table."""
    draw = torch.Generator().manual_seed(0)
    ids = [zipf_batches(ROWS, 1.05, count, BATCH, seed)[0] for seed in range(TABLES)]
    return [
        (
            torch.randn(BATCH, DENSE, generator=draw),
            torch.randint(0, 2, (BATCH,), generator=draw).float(),
            *(torch.from_numpy(own[number]) for own in ids),
        )
        for number in range(count)
    ]  # fmt: skip


def plan_of(
    example: Batch, settings: dict[str, Any] | None, cluster: Cluster | None = None
) -> Plan:
    """Returns the plan for one process, or the only device of a cluster; `settings` of the caches,
    None without."""
    problem = make_problem(
        trace(made(), example), cluster or Cluster.local(1), precision="fp32", optimizer="sgd"
    )
    plan = build_plan(problem, uniform_choice(problem), predict=False)
    if settings is None:
        return plan
    said = {
        f"tables.{number}.weight": ParameterChoice(
            store=FormChoice(form="cached", settings={**settings, "ids": str(2 + number)})
        )
        for number in range(TABLES)
    }
    return replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))


Step = Callable[[int], float]


def job_of(
    plan: Plan, given: list[Batch], rows: RowCounts | None, device: str = "cpu"
) -> tuple[Any, Step]:
    """Returns a job, and what takes a step with a batch by its number."""
    job = compile_job(made(), plan, optimizer="sgd", lr=LR, device=device, check=False,
                      example_inputs=given[0], rows=rows)  # fmt: skip

    def step(number: int) -> float:
        after = given[number + 1] if number + 1 < len(given) else None
        return float(job.step(given[number], next_batch=after))

    return job, step


def plain(given: list[Batch], device: str = "cpu") -> Step:
    """Returns what takes a step of plain PyTorch with sparse gradients, all in one memory."""
    own = made(sparse=True).to(device)
    stepped = torch.optim.SGD(own.parameters(), lr=LR)

    def step(number: int) -> float:
        stepped.zero_grad()
        loss = own(*(x.to(device) for x in given[number]))
        loss.backward()
        stepped.step()
        return float(loss.detach())

    return step


def in_turns(contenders: dict[str, Step], rounds: int) -> tuple[dict[str, list[float]], float]:
    """Returns the median step of each contender in each round, the first left out, and how far
    losses are from those of the first contender."""
    names, far = list(contenders), 0.0
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        losses: dict[str, list[float]] = {}
        for name in names if turn % 2 else reversed(names):
            times = []
            for number in range(turn * STEPS, (turn + 1) * STEPS):
                start = time.perf_counter()
                losses.setdefault(name, []).append(contenders[name](number))
                times.append(time.perf_counter() - start)
            if turn:
                found[name].append(median(times))
        for name in names:
            both = zip(losses[name], losses[names[0]], strict=True)
            far = max(far, *(abs(a - b) for a, b in both))
    return found, far


def rates(job: Any) -> Iterator[float]:
    """Yields the share of a batch's rows that were in slots, table by table."""
    for one in job.measured().caches:
        yield one.hit_rate


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.015)
    parser.add_argument("--link", default="2GB/s")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--policy", default="frequency")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    if given.small:
        TOP[:] = SMALL_TOP
    rate = parse_quantity(given.link, "rate")
    assert isinstance(rate, float)
    data = batches((given.rounds + 1) * STEPS + 1)
    counts = count_rows(made(), [batch for batch in batches(60)])
    settings = {"ratio": given.share, "policy": given.policy, "prefetch": given.prefetch}
    with shaped(rate):
        cached, step = job_of(plan_of(data[0], settings), data, counts)
        usual, usual_step = job_of(plan_of(data[0], None), data, None)
        contenders = {
            "tables in caches": step, "tables on the device, dense": usual_step,
            "plain PyTorch, sparse": plain(data),
        }  # fmt: skip
        found, far = in_turns(contenders, given.rounds)
        hits = list(rates(cached))
        slots = sum(one.slots for one in cached.measured().caches)
        cached.close()
        usual.close()
    console = Console(width=120)
    table = Table("contender", "ms a step", "speed of the cached one over it")
    own = found["tables in caches"]
    for name, times in found.items():
        ratio = median(b / a for a, b in zip(own, times, strict=True))
        table.add_row(name, f"{1e3 * median(times):.1f}", f"{ratio:.3f}")
    console.print(table)
    console.print(
        f"{slots:,} slots for {TABLES * ROWS:,} rows ({given.share:.1%}), {given.policy}, prefetch "
        f"{given.prefetch}, link {given.link}; {sum(hits) / len(hits):.1%} of a batch's distinct "
        f"rows were in slots; losses differ by {far:.1e} at most; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
