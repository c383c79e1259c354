"""How much of slow collectives `Stage.overlap` hides on real ranks, against what is predicted.

python -m benchmarks.overlap [--shares 0.25 0.5 0.75] [--steps 7]

Two Gloo processes train a GPT-2 under tensor parallelism of 2. Every collective of the model axis
is made to last as long as the cost model says of a link: it goes at once, and whoever waits for it
waits until that time is over, one after the other as on a wire. The link's bandwidth is such that
all collectives take the given share of the computing. Levels take turns, step by step.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.codegen.line import Line
from meshwright.costmodel.comm import Levels, collective_time
from meshwright.costmodel.measure import measure_local
from meshwright.costmodel.tables import CostTables
from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import Link
from meshwright.ir.graph import Graph
from meshwright.ir.plan import OVERLAPS, Overlap, Plan, model_mesh
from meshwright.ir.trace import trace
from meshwright.planner.candidates import build_plan, uniform_choice
from meshwright.planner.finishing.overlap import overlapped
from meshwright.planner.problem import Problem, make_problem
from meshwright.runtime.job import Job
from meshwright.runtime.job import compile as compile_job
from tests.codegen.test_models import split_all
from tests.spawn import run_ranks

BATCH, SEQUENCE, MICROBATCHES, RANKS = 8, 128, 1, 2


class SlowLine:
    """A line whose collectives last as long as `seconds` of their bytes says."""

    def __init__(self, line: Line, seconds: Callable[[Primitive, int], float]) -> None:
        self.line, self.seconds = line, seconds
        self.size, self.rank = line.size, line.rank
        self.free = 0.0
        """When the wire is done with all that has begun."""

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        if largest:
            return self.line.all_reduce(x, largest)
        return self.begin_all_reduce(x)()

    def all_gather(self, x: Tensor) -> Tensor:
        return self.begin_all_gather(x)()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.begin_reduce_scatter(x)()

    def all_to_all(self, parts: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        return self.line.all_to_all(parts, shapes)

    def shift(self, x: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return self.line.shift(x, shape)

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        return self._late(self.line.begin_all_reduce(x), Primitive.ALL_REDUCE, x.nbytes)

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        whole = x.nbytes * self.size
        return self._late(self.line.begin_all_gather(x), Primitive.ALL_GATHER, whole)

    def begin_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        return self._late(self.line.begin_reduce_scatter(x), Primitive.REDUCE_SCATTER, x.nbytes)

    def _late(
        self, arrive: Callable[[], Tensor], primitive: Primitive, nbytes: int
    ) -> Callable[[], Tensor]:
        ends = self.free = max(self.free, time.perf_counter()) + self.seconds(primitive, nbytes)

        def wait() -> Tensor:
            result = arrive()
            time.sleep(max(0.0, ends - time.perf_counter()))
            return result

        return wait


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=512, n_positions=SEQUENCE, n_embd=1280, n_layer=2, n_head=10, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )).train()  # fmt: skip


def batch() -> dict[str, Tensor]:
    ids = torch.randint(2, 512, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def with_link(cluster: Cluster, bandwidth: float) -> Cluster:
    link = Link(name="slow wire", bandwidth_bytes_per_s=bandwidth, latency_s=1e-5, step_s=1e-5)
    return replace(cluster, nodes=(replace(cluster.nodes[0], link=link),))


def planned(graph: Graph, cluster: Cluster) -> tuple[Problem, dict[Overlap, Plan]]:
    problem = make_problem(graph, cluster, precision="fp32", optimizer="sgd")
    # What can be split is split, however slow the wire.
    problem.solved[model_mesh({"tp": RANKS}), ""] = split_all(graph, RANKS)
    plain = build_plan(problem, uniform_choice(problem, tp=RANKS, num_microbatches=MICROBATCHES))
    return problem, {level: overlapped(problem, plain, level) for level in OVERLAPS}


def tensor_s(plan: Plan) -> float:
    assert plan.predicted and plan.predicted.breakdown
    return plan.predicted.breakdown.tensor_s


def step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def at_share(graph: Graph, cluster: Cluster, share: float) -> tuple[Problem, dict[Overlap, Plan]]:
    """With a link on which collectives take this share of the rest of a step."""
    bandwidth = 1e9
    for _ in range(4):
        problem, plans = planned(graph, with_link(cluster, bandwidth))
        sent_s = tensor_s(plans["none"])
        bandwidth *= sent_s / (share * (step_s(plans["none"]) - sent_s))
    return problem, plans


def train(
    graph: Graph, plans: dict[Overlap, Plan], levels: Levels, steps: int
) -> dict[str, list[float]]:
    """Seconds of steps of each level, and of no overlap on a wire that takes no time."""
    torch.set_num_threads(1)
    jobs = {level: _job(graph, plan, levels) for level, plan in plans.items()}
    free = {"free": _job(graph, plans["none"], ())}
    data = batch()
    found: dict[str, list[float]] = {name: [] for name in (*free, *jobs)}
    for _ in range(steps + 1):
        for name, job in {**free, **jobs}.items():
            begun = time.perf_counter()
            float(job.step(data))
            found[name].append(time.perf_counter() - begun)
    return {name: seconds[1:] for name, seconds in found.items()}


def _job(graph: Graph, plan: Plan, levels: Levels) -> Job:
    job = compile_job(build(), plan, optimizer="sgd", lr=1e-4, device="cpu", graph=graph)
    for stage in job.parts.stages.values():
        lines = stage.comm._lines
        lines["tp"] = SlowLine(lines["tp"], lambda p, n: collective_time(p, n, levels))
    return job


def row(share: float, plans: dict[Overlap, Plan], seconds: dict[str, list[float]]) -> Sequence[str]:
    """A line per level."""
    took = {name: median(found) for name, found in seconds.items()}
    lines = []
    for level in OVERLAPS[1:]:
        can_s = step_s(plans["none"]) - step_s(plans[level])
        did_s = took["none"] - took[level]
        lines.append(
            f"| {share:g} | {took['free'] * 1e3:.0f} | {took['none'] * 1e3:.0f} | {level} | "
            f"{took[level] * 1e3:.0f} | {did_s * 1e3:.0f} | {can_s * 1e3:.0f} | "
            f"{did_s / can_s:.0%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    machine = measure_local(RANKS)
    graph = trace(build(), batch())
    print("| share | no wire, ms | no overlap, ms | level | ms | hidden | predicted | of it |")
    print("|---|---|---|---|---|---|---|---|")
    for share in given.shares:
        problem, plans = at_share(graph, machine, share)
        levels = CostTables(graph, problem.cluster, "fp32").levels(tuple(range(RANKS)))
        found = run_ranks(RANKS, train, graph, plans, levels, given.steps, timeout_s=300.0)
        # The slower rank of each step.
        slowest = {n: [max(pair) for pair in zip(*(f[n] for f in found), strict=True)]
                   for n in found[0]}  # fmt: skip
        for line in row(share, plans, slowest):
            print(line, flush=True)


if __name__ == "__main__":
    main()
