"""Blocks as torch.compile makes them: what a profile predicts of a step, and what it takes.

python -m benchmarks.compiled [--width 512] [--layers 4] [--tokens 128] [--batch 8] [--steps 7]

One process trains a GPT-2 on sequences in float32, uncompiled and compiled, step by step in turns.
Blocks were profiled both ways just before; the search is then free to compile or not. What tensors
hold at most, beyond what is there between steps, is counted by torch's profiler, which sees the
buffers of compiled code too.
"""

import argparse
import time
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search
from meshwright.profiling.profiling import profile
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.testing.spawn import run_ranks

PINS = ("num_microbatches=1", "recompute=none", "saved=none")


@dataclass(frozen=True)
class Size:
    """Of a GPT-2 and its batch."""

    width: int
    layers: int
    tokens: int
    batch: int


def build(size: Size) -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=2048, n_positions=size.tokens, n_embd=size.width, n_layer=size.layers,
        n_head=size.width // 64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )).train()  # fmt: skip


def batch(size: Size) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 2048, (size.batch, size.tokens), generator=draw)
    return {"input_ids": ids, "labels": ids}


def peak_bytes(job: Job, data: dict[str, Tensor]) -> int:
    """Of a step, above what is there before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        float(job.step(data))
    assert seen.profiler
    events = seen.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(accumulate(nbytes for _, nbytes in sorted(changes, key=lambda one: one[0])))


Trained = tuple[dict[str, list[float]], dict[str, int]]


def train(size: Size, graph: Graph, plans: dict[str, Plan], steps: int) -> Trained:
    """Seconds of steps of each plan, the first of which compiles, and bytes of one."""
    torch.set_num_threads(1)
    data, found = batch(size), {name: list[float]() for name in plans}
    jobs = {
        name: compile_job(build(size), plan, optimizer="sgd", lr=1e-4, device="cpu", graph=graph)
        for name, plan in plans.items()
    }
    for _ in range(steps + 2):
        for name, job in jobs.items():
            begun = time.perf_counter()
            float(job.step(data))
            found[name].append(time.perf_counter() - begun)
    return found, {name: peak_bytes(job, data) for name, job in jobs.items()}


def passing_bytes(plan: Plan) -> int:
    """What is predicted of tensors that are gone between steps."""
    assert plan.predicted
    held = plan.predicted.stages[0].memory
    return held.gradients_bytes + held.activations_bytes + held.workspace_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("width", 512), ("layers", 4), ("tokens", 128), ("batch", 8), ("steps", 7)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    size = Size(given.width, given.layers, given.tokens, given.batch)
    graph, cluster = trace(build(size), batch(size)), Cluster.local(1)
    known = profile(graph, cluster, precision="fp32", optimizer="sgd", constraints=PINS,
                    compiled=True, progress=False)  # fmt: skip

    def found(*pins: str) -> Plan:
        return search(graph, cluster, precision="fp32", optimizer="sgd", profile=known,
                      constraints=(*PINS, *pins), progress=False)  # fmt: skip

    plans = {asked: found(f"compile={asked}") for asked in ("false", "true")}
    ((seconds, peaks),) = run_ranks(1, train, size, graph, plans, given.steps, timeout_s=400.0)
    print("| compile | predicted, ms | a step, ms | off | first step, s | predicted, MiB | MiB |")
    print("|---|---|---|---|---|---|---|")
    for name, plan in plans.items():
        assert plan.predicted
        said, took = plan.predicted.step_s, median(seconds[name][2:])
        print(
            f"| {name} | {said * 1e3:.1f} | {took * 1e3:.1f} | {said / took - 1:+.1%} | "
            f"{seconds[name][0]:.1f} | {passing_bytes(plan) / 2**20:.1f} | "
            f"{peaks[name] / 2**20:.1f} |"
        )
    print(f"the search by itself: compile={str(found().stages[0].compile).lower()}")


if __name__ == "__main__":
    main()
