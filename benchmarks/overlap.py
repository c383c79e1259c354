"""How much of slow collectives `Stage.overlap` hides on real ranks, against what is predicted.

python -m benchmarks.overlap [--shares 0.25 0.5 0.75] [--steps 7] [--width 1280] [--layers 2]
    [--tokens 128]

Two Gloo processes train a GPT-2 under tensor parallelism of 2. Every collective of the model axis
is made to last as long as the cost model says of a link: it goes at once, and whoever waits for it
waits until that time is over, one after the other as on a wire. The link's bandwidth is such that
all collectives take the given share of the computing. Levels take turns, step by step. What halves
cost by themselves is seen where the wire takes no time.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.codegen.collectives.line import Line
from meshwright.costmodel.comm.comm import Levels, collective_time, group_levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import OVERLAPS, Overlap, Plan, model_mesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.decisions.overlap import overlapped
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.testing.spawn import run_ranks
from meshwright.testing.split_all import split_all

BATCH, MICROBATCHES, RANKS = 8, 1, 2
LEAST_FREE = 0.1
"""Of a core, while the wire is busy."""


@dataclass(frozen=True)
class Size:
    """Of a GPT-2."""

    width: int
    layers: int
    tokens: int
    """Of a sequence."""


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


def build(size: Size) -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=512, n_positions=size.tokens, n_embd=size.width, n_layer=size.layers,
        n_head=size.width // 128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )).train()  # fmt: skip


def batch(size: Size) -> dict[str, Tensor]:
    ids = torch.randint(2, 512, (BATCH, size.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def with_link(cluster: Cluster, size: Size, bandwidth: float) -> Cluster:
    """A wire of this bandwidth in place of the measured link. What Gloo needs of the cores while it
    is busy slows the computing beside it."""
    link = cluster.nodes[0].link
    wire = replace(
        link,
        name="slow wire",
        bandwidth_bytes_per_s=bandwidth,
        efficiency=1.0,
        curves=(),
        beside=(),
    )
    slow = replace(cluster, nodes=(replace(cluster.nodes[0], link=wire),))
    nbytes = 4 * BATCH * size.tokens * size.width // 2
    real_s, wire_s = (collective_time(Primitive.ALL_REDUCE, nbytes, group_levels((0, 1), one))
                      for one in (cluster, slow))  # fmt: skip
    free = max(LEAST_FREE, 1.0 - real_s / wire_s)
    return replace(slow, nodes=(replace(
        slow.nodes[0], link=replace(wire, overlap_compute_slowdown=1.0 / free)
    ),))  # fmt: skip


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


def at_share(
    graph: Graph, cluster: Cluster, size: Size, share: float
) -> tuple[Problem, dict[Overlap, Plan]]:
    """With a link on which collectives take this share of the rest of a step."""
    bandwidth = 1e9
    for _ in range(4):
        problem, plans = planned(graph, with_link(cluster, size, bandwidth))
        sent_s = tensor_s(plans["none"])
        bandwidth *= sent_s / (share * (step_s(plans["none"]) - sent_s))
    return problem, plans


def train(
    size: Size, graph: Graph, plans: dict[Overlap, Plan], levels: Levels, steps: int
) -> dict[str, list[float]]:
    """Seconds of steps of each level, and of whole micro-batches and halves on a wire that takes no
    time."""
    torch.set_num_threads(1)
    jobs = {level: _job(size, graph, plan, levels) for level, plan in plans.items()}
    free = {f"free {n}": _job(size, graph, plans[n], ()) for n in ("none", "block")}
    data = batch(size)
    found: dict[str, list[float]] = {name: [] for name in (*free, *jobs)}
    for _ in range(steps + 1):
        for name, job in {**free, **jobs}.items():
            begun = time.perf_counter()
            float(job.step(data))
            found[name].append(time.perf_counter() - begun)
    return {name: seconds[1:] for name, seconds in found.items()}


def _job(size: Size, graph: Graph, plan: Plan, levels: Levels) -> Job:
    job = compile_job(build(size), plan, optimizer="sgd", lr=1e-4, device="cpu", graph=graph)
    for stage in job.parts.stages.values():
        lines = stage.comm._lines
        lines["tp"] = SlowLine(lines["tp"], lambda p, n: collective_time(p, n, levels))
    return job


def row(share: float, plans: dict[Overlap, Plan], seconds: dict[str, list[float]]) -> Sequence[str]:
    """A line per level."""
    took = {name: median(found) for name, found in seconds.items()}
    turns = list(zip(seconds["none"], *(seconds[level] for level in OVERLAPS[1:]), strict=True))
    lines = []
    for place, level in enumerate(OVERLAPS[1:], 1):
        can_s = step_s(plans["none"]) - step_s(plans[level])
        # Within a turn: the machine's speed drifts.
        saved = [turn[0] - turn[place] for turn in turns]
        did_s, off_s = median(saved), error_of_median(saved)
        lines.append(
            f"| {share:g} | {took['free none'] * 1e3:.0f} | {took['none'] * 1e3:.0f} | {level} | "
            f"{took[level] * 1e3:.0f} | {did_s * 1e3:.0f} ± {off_s * 1e3:.0f} | "
            f"{can_s * 1e3:.0f} | {did_s / can_s:.0%} |"
        )
    return lines


def error_of_median(values: Sequence[float]) -> float:
    """Standard error, from the middle half of the values."""
    low, _, high = quantiles(values, n=4)
    return 1.25 * (high - low) / 1.35 / sqrt(len(values))


def halves_cost(plan: Plan, plain: Plan) -> float:
    """Seconds that working in halves adds to the computing, as predicted."""
    assert plan.predicted and plain.predicted
    one, other = plan.predicted.breakdown, plain.predicted.breakdown
    assert one and other
    return one.forward_s + one.backward_s - other.forward_s - other.backward_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    size = Size(given.width, given.layers, given.tokens)
    machine = measure_local(RANKS)
    graph = trace(build(size), batch(size))
    print(
        "| share | no wire, ms | no overlap, ms | level | ms | hidden, ms | predicted, ms | of it |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for share in given.shares:
        problem, plans = at_share(graph, machine, size, share)
        levels = CostTables(graph, problem.cluster, "fp32").levels(tuple(range(RANKS)))
        found = run_ranks(RANKS, train, size, graph, plans, levels, given.steps, timeout_s=300.0)
        # The slower rank of each step.
        slowest = {n: [max(pair) for pair in zip(*(f[n] for f in found), strict=True)]
                   for n in found[0]}  # fmt: skip
        for line in row(share, plans, slowest):
            print(line, flush=True)
        free = {n: median(slowest[f"free {n}"]) for n in ("none", "block")}
        cost_s = halves_cost(plans["block"], plans["none"])
        print(
            f"halves alone: {(free['block'] - free['none']) * 1e3:.0f} ms, predicted "
            f"{cost_s * 1e3:.0f}; a step without a wire {free['none'] * 1e3:.0f} ms, predicted "
            f"{(step_s(plans['none']) - tensor_s(plans['none'])) * 1e3:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
