"""How well a language model trains when less goes of its gradients, at equal bytes.

python -m benchmarks.approximate [--steps 600] [--fewer 16] [--seeds 0 1 2]

Four Gloo processes train a small model of the next word on the words of this interpreter's own
library (benchmarks.row_forms; the 2,047 most frequent ones, and one for all others) by plain SGD,
as jobs of plans that differ in `sync` alone: exact sums, sketches, products of thin matrices and
late averages, each set so that about `fewer` times fewer bytes go; and two of them without keeping
what they lose. Printed are the bytes that went, counted, and the loss on words left out, in nats,
seed by seed.
"""

import argparse
import time
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.row_forms import library_tokens
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.sent import counted
from meshwright.testing.spawn import run_ranks

RANKS, EACH, VOCAB, WIDTH, BEFORE, LR = 4, 64, 2048, 64, 4, 1.0
LEFT_OUT = 20_000
"""Words at the end of the stream that nobody trains on."""


@dataclass(frozen=True)
class Case:
    """One way to agree."""

    form: str = ""
    settings: tuple[tuple[str, Any], ...] = ()


def cases(fewer: int) -> dict[str, Case]:
    """Each sends about so many times fewer bytes than exact sums."""
    sketch, thin = ("cells", 1 / fewer), ("rank", WIDTH // fewer)
    dropped = ("feedback", "no")
    return {
        "exact": Case(),
        "sketch": Case("sketch", (sketch,)),
        "thin matrices": Case("powersgd", (thin,)),
        "late averages": Case("dasgd", (("every", fewer), ("delay", fewer // 2))),
        "sketch, losses dropped": Case("sketch", (sketch, dropped)),
        "thin matrices, losses dropped": Case("powersgd", (thin, dropped)),
    }


class NextWord(nn.Module):
    """Words before, each as a row of a table; two layers, and a score for each word. The loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.hidden, self.narrow = nn.Linear(BEFORE * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, VOCAB)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        x = torch.relu(self.hidden(self.words(before).flatten(1)))
        return nn.functional.cross_entropy(self.scores(torch.relu(self.narrow(x))), after)


def model(seed: int) -> NextWord:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NextWord()


@cache
def stream() -> Tensor:
    """Words by frequency; the last number is for all that are rare."""
    ids = library_tokens()
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    return torch.from_numpy(np.minimum(rank[inverse], VOCAB - 1))


def batch(words: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Words before and after some places of the stream."""
    found = words[starts[:, None] + torch.arange(BEFORE + 1)]
    return found[:, :BEFORE], found[:, BEFORE]


def planned(case: Case) -> Plan:
    places = torch.zeros(RANKS * EACH, dtype=torch.int64)
    traced = trace(model(0), batch(torch.zeros(9, dtype=torch.int64), places))
    problem = make_problem(traced, Cluster.local(RANKS), precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=RANKS), predict=False)
    sync = FormChoice(form=case.form, settings=dict(case.settings)) if case.form else None
    return replace(plan, stages=(replace(plan.stages[0], sync=sync),))


def trained(case: Case, steps: int, seed: int, rate: float = LR) -> tuple[float, float]:
    """Bytes in a step, and the loss on what was left out; on one rank, every rank calls it."""
    words, own = stream(), model(seed)
    draw = torch.Generator().manual_seed(100 + seed)
    last = len(words) - LEFT_OUT
    starts = torch.randint(0, last - BEFORE, (steps, RANKS * EACH), generator=draw)
    first = batch(words, starts[0])
    job = compile_job(
        own, planned(case), optimizer="sgd", lr=rate, device="cpu", check=False,
        example_inputs=first,
    )  # fmt: skip
    with counted(job) as sent:
        for step in range(steps):
            job.step(batch(words, starts[step]))
    job.sync_to()
    job.close()
    with torch.no_grad():
        places = torch.arange(last, len(words) - BEFORE - 1)
        losses = [float(own(*batch(words, part))) for part in places.split(2000)[:-1]]
    return sum(map(sum, sent)) / steps, mean(losses)


def all_cases(
    fewer: int, steps: int, seeds: tuple[int, ...]
) -> dict[str, list[tuple[float, float]]]:
    """Of each case what `trained` says, seed by seed."""
    return {
        name: [trained(case, steps, seed) for seed in seeds] for name, case in cases(fewer).items()
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--fewer", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    begun = time.monotonic()
    found = run_ranks(
        RANKS, all_cases, given.fewer, given.steps, tuple(given.seeds), timeout_s=3000
    )[0]
    whole, usual = found["exact"][0][0], mean(loss for _, loss in found["exact"])
    table = Table(
        f"{given.steps} steps", "bytes of exact", *(f"seed {seed}" for seed in given.seeds),
        "worse by",
    )  # fmt: skip
    for name, rows in found.items():
        losses = [loss for _, loss in rows]
        worse = f"{mean(losses) - usual:+.3f}"
        table.add_row(name, f"{mean(n for n, _ in rows) / whole:.3f}",
                      *(f"{loss:.3f}" for loss in losses), worse)  # fmt: skip
    Console().print(table)
    spread = stdev([loss for _, loss in found["exact"]]) if len(given.seeds) > 1 else 0.0
    print(f"exact runs differ by {spread:.3f} (standard deviation over seeds)")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
