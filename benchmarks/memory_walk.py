"""Memory of every precision in every store: tracked bytes of tensors beside predicted ones.

python -m benchmarks.memory_walk [--precisions fp32 bf16] [--stores on_host] [--link 200MB/s]

Six layers of 512 x 512, AdamW, two micro-batches on two ranks of this machine (one for stores that
are for one), a host behind a link that is made as slow as said. The most bytes of live tensors in
the third step, of the rank that has most; the last lines are the worst of all. What of gradients is
still on its way to the host when a block has most is a matter of time, and differs from run to run:
`at most` is what there is if copies end as late as the job lets them, which must fit.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.host_link import shaped
from meshwright.ir.cluster.device import parse_quantity
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.deep import Deep, batch
from meshwright.testing.hosts import apart
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks

PRECISIONS = ("fp32", "bf16", "bf16-sums", "fp16", "bf16-autocast", "fp64", "bf16, layers.1=fp32")
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "whole": ({"dp_shard": 2, "zero": 0}, ""),
    "zero 1": ({"dp_shard": 2, "zero": 1}, ""),
    "zero 2": ({"dp_shard": 2, "zero": 2}, ""),
    "zero 3": ({"dp_shard": 2, "zero": 3}, ""),
    "update_on_host": ({}, "update_on_host"),
    "update_on_host, zero 1": ({"dp_shard": 2, "zero": 1}, "update_on_host"),
    "sums_on_host": ({}, "sums_on_host"),
    "on_host": ({}, "on_host"),
    "shards_on_host": ({"dp_shard": 2, "zero": 3}, "shards_on_host"),
}
"""By name: sizes of the mesh, and the store of all parameters."""


def given_in(precision: str) -> tuple[nn.Module, tuple[Tensor]]:
    """The model and its batch."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    return Deep().to(dtype), batch(dtype)


@cache
def graph(precision: str) -> Graph:
    return trace(*given_in(precision), precision=precision)


def planned(precision: str, name: str, link: float) -> tuple[Plan, int, int]:
    """A plan, the bytes of tensors that are predicted of it, and at most."""
    sizes, store = CHOICES[name]
    ranks = sizes.get("dp_shard", 1)
    problem = make_problem(graph(precision), apart(ranks, link), precision=precision)
    choice = uniform_choice(problem, num_microbatches=2, **sizes)
    plan = build_plan(problem, choice, predict=False)
    if store:
        stages = tuple(replace(s, store=FormChoice(form=store)) for s in plan.stages)
        plan = replace(plan, stages=stages)
    (memory,) = [s.memory for s in predict_plan(problem, plan).stages]
    return plan, memory.tensor_bytes, memory.tensor_bytes + memory.late_copies_bytes


def most(plans: list[Plan], link: float) -> list[int | str]:
    """The most bytes of tensors on this rank, or why a plan does not run."""
    found: list[int | str] = []
    for plan in plans:
        model, batch = given_in(plan.precision)
        try:
            with shaped(link):
                job = compile_job(
                    model, plan, optimizer="adamw", device="cpu", graph=graph(plan.precision),
                    check=False,
                )  # fmt: skip
                found.append(peak_of(job, batch))
        except PlanError as error:
            found.append(str(error))
    return found


def walk(
    precisions: list[str], stores: list[str], link: float
) -> Iterator[tuple[str, str, int, int, int]]:
    """Yields precision, store, bytes tracked, predicted, and at most; says what is refused."""
    cases = []
    for precision in precisions:
        for name in stores:
            try:
                cases.append((precision, name, *planned(precision, name, link)))
            except PlanError as error:
                print(f"{precision} | {name} | refused: {error}", flush=True)
    for ranks in (1, 2):
        own = [case for case in cases if case[2].world_size == ranks]
        plans = [case[2] for case in own]
        by_rank = run_ranks(ranks, most, plans, link, timeout_s=900)
        for (precision, name, _, said, limit), *found in zip(own, *by_rank, strict=True):
            refused = next((x for x in found if isinstance(x, str)), "")
            if refused:
                print(f"{precision} | {name} | refused: {refused}", flush=True)
            else:
                yield precision, name, max(x for x in found if isinstance(x, int)), said, limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--stores", nargs="+", default=list(CHOICES), choices=list(CHOICES))
    parser.add_argument("--link", default="200MB/s")
    given = parser.parse_args()
    link = parse_quantity(given.link, "rate")
    assert isinstance(link, float)
    worst, over = (0.0, ""), (-1.0, "")
    for precision, name, tracked, said, limit in walk(given.precisions, given.stores, link):
        off, above = said / tracked - 1, tracked / limit - 1
        cells = *(f"{nbytes / 1e6:.2f}" for nbytes in (tracked, said)), f"{off:+.2%}"
        print(precision, name, *cells, f"at most {limit / 1e6:.2f}", sep=" | ", flush=True)
        where = f"{precision}, {name}"
        worst = max(worst, (off, where), key=lambda x: abs(x[0]))
        over = max(over, (above, where))
    print(f"worst: {worst[0]:+.2%} ({worst[1]})")
    print(f"tracked beside at most: {over[0]:+.2%} ({over[1]})")


if __name__ == "__main__":
    main()
