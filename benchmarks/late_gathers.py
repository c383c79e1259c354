"""What DeAR hides of slow messages on real ranks, beside ZeRO-1, against what the wire would allow.

python -m benchmarks.late_gathers [--shares 0.5 1.0] [--steps 7] [--width 64] [--layers 8]

Two Gloo processes train a chain of small layers under data parallelism. Each layer is made to last
as on a device beside the process: 20 ms forward, 40 ms backward; and every gather and
reduce-scatter as a wire of a given bandwidth would have it: it goes at once, and whoever waits for
it waits until that time is over, one after the other. The bandwidth is such that all gathers of a
step take the given share of a forward. Forms take turns, step by step. `by the wire` is reckoned
from those times alone: a layer runs when its parameters have come, a message goes when the wire is
free. `predicted` is what the cost model says of the same plans (`plan.predicted`), for devices that
share no cores, a link of that bandwidth, and blocks that take what they took here without a wire.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.costmodel.block.block_costs import BlockSpot
from meshwright.forms.flat import ShardedBucket
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import Link
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.profile.profile import BlockRecord, Machine, Profile, Timing
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.stage.stage import BlockModule
from meshwright.testing.spawn import run_ranks

RANKS, BATCH = 2, 8
FORWARD_S, BACKWARD_S = 0.02, 0.04
"""Of a layer."""
ZERO1, PARAMETERS, GRADIENTS = "zero 1", "dear, parameters", "dear, gradients"


class Chain(nn.Module):
    """Layers of equal size."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(layers)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return ((x - y) ** 2).mean()


class Wire:
    """Of one rank: messages go one after the other."""

    def __init__(self) -> None:
        self.bytes_per_s, self.free = 0.0, 0.0

    def late(self, work: Any, nbytes: int) -> "_Late":
        """The work, which ends when the wire has carried so many bytes."""
        if not self.bytes_per_s:
            return _Late(work, 0.0)
        self.free = max(self.free, time.perf_counter()) + nbytes / self.bytes_per_s
        return _Late(work, self.free)


@dataclass(frozen=True)
class _Late:
    work: Any
    ends: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.ends - time.perf_counter()))


def shaped(wire: Wire) -> None:
    """All buckets of this process use the wire; each sends half of what it gathers or scatters."""
    for name in ("gather", "scatter"):
        original = getattr(ShardedBucket, name)

        def slow(bucket: Any, *args: Any, original: Any = original) -> Any:
            flat, work = original(bucket, *args)
            nbytes = bucket.size * flat.element_size() * (bucket.peers.size - 1)
            return flat, wire.late(work, nbytes)

        setattr(ShardedBucket, name, slow)


def lasting() -> None:
    """Layers of this process take their time, as on a device that needs no core."""
    forward = BlockModule.forward

    def slow(block: Any, *args: Any, **more: Any) -> Any:
        time.sleep(FORWARD_S)
        return forward(block, *args, **more)

    BlockModule.forward = slow  # type: ignore[method-assign]


def lasting_backward(job: Job) -> None:
    """The same for backwards of a job."""
    for stage in job.parts.stages.values():
        after = stage.sync.after_backward

        def slow(call: int, last: bool, after: Any = after) -> None:
            time.sleep(BACKWARD_S)
            after(call, last)

        stage.sync.after_backward = slow  # type: ignore[method-assign]


def traced(width: int, layers: int) -> Graph:
    example = (torch.zeros(BATCH, width), torch.zeros(BATCH, width))
    return trace(Chain(width, layers), example)


def plans(graph: Graph, width: int) -> dict[str, Plan]:
    """DeAR with a bucket for each layer; ZeRO-1's own, of 25 MB, holds them all."""
    problem = make_problem(graph, Cluster.local(RANKS), precision="fp32", optimizer="sgd")
    sharded, whole = (
        build_plan(problem, uniform_choice(problem, **size), predict=False)
        for size in ({"dp_shard": RANKS, "zero": 1}, {"dp_replicate": RANKS})
    )
    sync = FormChoice(form="dear", settings={"bucket_bytes": 8 * (width * width + width)})
    late = [rehash(replace(p, stages=(replace(p.stages[0], sync=sync),))) for p in (sharded, whole)]
    return {ZERO1: sharded, PARAMETERS: late[0], GRADIENTS: late[1]}


def predicted(
    graph: Graph, forms: dict[str, Plan], bytes_per_s: float, block_s: float
) -> dict[str, float]:
    """Seconds of each form's step where a block takes `block_s`, a third of it forward."""
    local = Cluster.local(RANKS)
    wire = Link(name="wire", bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    node = replace(local.nodes[0], cores=0, link=wire)
    cluster = replace(local, name="wire", nodes=(node,))
    device = cluster.device_types[0]
    spot = BlockSpot(BATCH // RANKS, 1, (), device.name, (), ())
    plain = make_problem(graph, cluster, precision="fp32", optimizer="sgd")
    layouts = {layout.pattern: layout for layout in plain.layouts(())}
    share = FORWARD_S / (FORWARD_S + BACKWARD_S)
    forward, backward = (
        Timing(median_s=seconds, spread=0.01, count=10)
        for seconds in (share * block_s, (1 - share) * block_s)
    )
    records = {}
    for block in graph.blocks:
        key = plain.tables.blocks.key(block, layouts[block.pattern], spot)
        records[key] = BlockRecord(
            key=key, pattern=block.pattern, samples=spot.samples, tp=1, processes=1,
            forward=forward, backward=backward, backward_input=None, backward_weight=None,
        )  # fmt: skip
    machine = Machine(
        device=device.name, kind="cpu", driver="", torch=torch.__version__, backend="gloo"
    )
    profile = Profile(machine=machine, blocks=records)
    problem = make_problem(graph, cluster, precision="fp32", optimizer="sgd", profile=profile)
    return {name: predict_plan(problem, plan).step_s for name, plan in forms.items()}


class Trained(NamedTuple):
    """What one rank found."""

    blocks: int
    block_s: float
    """Of a step without a wire, for each block."""
    took: dict[float, dict[str, list[float]]]
    """By the share of the forward that gathers take, seconds of each form's steps."""
    bytes_per_s: dict[float, float]
    """Of the wire, by that share."""


def train(
    forms: dict[str, Plan], width: int, layers: int, shares: Sequence[float], steps: int
) -> Trained:
    torch.set_num_threads(1)
    wire = Wire()
    shaped(wire)
    jobs = {
        name: compile_job(Chain(width, layers), plan, lr=1e-3, device="cpu", check=False)
        for name, plan in forms.items()
    }
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1))
    data = (x, x.flip(0))
    lasting()
    for job in jobs.values():
        lasting_backward(job)
        _seconds(job, data)
    blocks = len(next(iter(jobs[ZERO1].parts.stages.values())).blocks)
    nbytes = 4 * 2 * layers * (width * width + width) // RANKS
    free = median([_seconds(jobs[ZERO1], data) for _ in range(steps)]) / blocks
    found: dict[float, dict[str, list[float]]] = {}
    speeds: dict[float, float] = {}
    for share in shares:
        for job in jobs.values():
            job.settle()
        wire.bytes_per_s = speeds[share] = nbytes / (share * blocks * FORWARD_S)
        took: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(steps + 1):
            # Blocks of two: what a step leaves to the next must find it there.
            for name, job in jobs.items():
                _seconds(job, data)
                took[name].append(_seconds(job, data))
                job.settle()
        found[share] = {name: seconds[1:] for name, seconds in took.items()}
    for job in jobs.values():
        job.close()
    return Trained(blocks, free, found, speeds)


def _seconds(job: Job, data: tuple[Tensor, Tensor]) -> float:
    begun = time.perf_counter()
    float(job.step(data))
    return time.perf_counter() - begun


def reckoned(share: float, blocks: int, layers: int, late: bool) -> float:
    """A step by the wire. Late: reduce-scatters go under the backward, gathers under the forward;
    else, in one bucket, all goes when the backward is over."""
    message = share * blocks * FORWARD_S / layers
    if not late:
        return blocks * (FORWARD_S + BACKWARD_S) + 2 * layers * message
    now, wire = 0.0, message  # the first gather began when the step before ended
    for layer in range(layers):
        now = max(now, wire)
        if layer + 1 < layers:
            wire = max(wire, now) + message
        now += FORWARD_S
    now += (blocks - layers) * (FORWARD_S + BACKWARD_S)
    for _ in range(layers):
        now += BACKWARD_S
        wire = max(wire, now) + message
    return max(now, wire)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    asked = parser.parse_args()
    graph = traced(asked.width, asked.layers)
    forms = plans(graph, asked.width)
    found: Trained = run_ranks(
        RANKS, train, forms, asked.width, asked.layers, asked.shares, asked.steps, timeout_s=900
    )[0]
    print(f"{found.blocks} blocks of {1e3 * found.block_s:.1f} ms")
    print()
    print("| gathers / forward | form | step, ms | by the wire | predicted | gain | predicted |")
    print("|---|---|---|---|---|---|---|")
    for share, took in found.took.items():
        usual = reckoned(share, found.blocks, asked.layers, False)
        late = reckoned(share, found.blocks, asked.layers, True)
        said = predicted(graph, forms, found.bytes_per_s[share], found.block_s)
        for name, seconds in took.items():
            ratio = median(a / b for a, b in zip(seconds, took[ZERO1], strict=True))
            wire = usual if name == ZERO1 else late
            print(
                f"| {share} | {name} | {1e3 * median(seconds):.0f} | {1e3 * wire:.0f} "
                f"| {1e3 * said[name]:.0f} | {1 - ratio:.1%} | {1 - said[name] / said[ZERO1]:.1%} |"
            )


if __name__ == "__main__":
    main()
