"""What DeAR hides of slow messages on real ranks, beside ZeRO-1, against what the wire would allow.

python -m benchmarks.late_gathers [--shares 0.5 1.0] [--steps 7] [--width 64] [--layers 8]

Two Gloo processes train a chain of small layers under data parallelism. Each layer is made to last
as on a device beside the process: 20 ms forward, 40 ms backward; and every gather and
reduce-scatter as a wire of a given bandwidth would have it: it goes at once, and whoever waits for
it waits until that time is over, one after the other. The bandwidth is such that all gathers of a
step take the given share of a forward. Forms take turns, step by step. `by the wire` is reckoned
from those times alone: a layer runs when its parameters have come, a message goes when the wire is
free.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.flat import ShardedBucket
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan, SyncChoice
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.job import compile as compile_job
from meshwright.runtime.stage.stage import BlockModule
from tests.spawn import run_ranks

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


def plans(width: int, layers: int) -> dict[str, Plan]:
    """DeAR with a bucket for each layer; ZeRO-1's own, of 25 MB, holds them all."""
    example = (torch.zeros(BATCH, width), torch.zeros(BATCH, width))
    graph = trace(Chain(width, layers), example)
    problem = make_problem(graph, Cluster.local(RANKS), precision="fp32", optimizer="sgd")
    sharded, whole = (
        build_plan(problem, uniform_choice(problem, **size), predict=False)
        for size in ({"dp_shard": RANKS, "zero": 1}, {"dp_replicate": RANKS})
    )
    sync = SyncChoice(form="dear", settings={"bucket_bytes": 8 * (width * width + width)})
    late = [rehash(replace(p, stages=(replace(p.stages[0], sync=sync),))) for p in (sharded, whole)]
    return {ZERO1: sharded, PARAMETERS: late[0], GRADIENTS: late[1]}


def train(
    forms: dict[str, Plan], width: int, layers: int, shares: Sequence[float], steps: int
) -> tuple[int, dict[float, dict[str, list[float]]]]:
    """Blocks, and by the share of the forward that gathers take, seconds of each form's steps."""
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
    found: dict[float, dict[str, list[float]]] = {}
    for share in shares:
        for job in jobs.values():
            job.settle()
        wire.bytes_per_s = nbytes / (share * blocks * FORWARD_S)
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
    return blocks, found


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
    forms = plans(asked.width, asked.layers)
    blocks, found = run_ranks(
        RANKS, train, forms, asked.width, asked.layers, asked.shares, asked.steps, timeout_s=900
    )[0]
    print("| gathers / forward | form | step, ms | by the wire, ms | to zero 1 | by the wire |")
    print("|---|---|---|---|---|---|")
    for share, took in found.items():
        usual = reckoned(share, blocks, asked.layers, False)
        late = reckoned(share, blocks, asked.layers, True)
        for name, seconds in took.items():
            ratio = median(a / b for a, b in zip(seconds, took[ZERO1], strict=True))
            wire = usual if name == ZERO1 else late
            print(
                f"| {share} | {name} | {1e3 * median(seconds):.0f} | {1e3 * wire:.0f} "
                f"| {ratio:.3f} | {wire / usual:.3f} |"
            )


if __name__ == "__main__":
    main()
