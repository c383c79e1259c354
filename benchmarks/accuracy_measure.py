"""Runs one plan on forked ranks: seconds of its steps, where they go, and peak memory.

A rank is a process forked from one that has imported torch and traced the models but never trained.
Its base is what is resident once it has the user's model, its process group and has taken a tiny
training step; its resident peak is the kernel's high-water mark (VmHWM), reset before the job is
made. Both count pages that it shares with its parent, so their difference is what training adds.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.accuracy_data import Measured
from benchmarks.accuracy_models import Subject
from meshwright.display import peak_bytes, reset_peak
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.runtime.job import Job
from meshwright.runtime.job import compile as compile_job
from meshwright.runtime.stats import StepRecord
from tests.spawn import run_ranks

LEARNING_RATE = 1e-4
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class RankRun:
    """One rank's side of a run."""

    steps_s: tuple[float, ...]
    seconds: dict[str, float]
    cpu_s: float
    base_bytes: int
    resident_bytes: int
    tensor_bytes: int | None


def base_bytes(subject: Subject, ranks: int) -> int:
    """What a process has resident before it makes a job; mean over the ranks."""
    return round(statistics.mean(run_ranks(ranks, _base, subject)))


def _base(subject: Subject) -> int:
    model = subject.model()
    _touch()
    resident = reset_peak()
    del model
    return resident


def _touch() -> None:
    """Maps the libraries that training uses: a step of a layer, and a sum over the ranks."""
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.randn(64, 64)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.zeros(1))
    gc.collect()


def run_plan(
    subject: Subject, name: str, graph: Graph, plan: Plan, *, turn: int, warmup: int, steps: int
) -> Measured:
    """Trains `warmup` and then `steps` steps on one process per rank of the plan."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found: list[RankRun] = run_ranks(
        plan.world_size, _train, subject, graph, plan, warmup, steps, timeout_s=TIMEOUT_S
    )
    kinds = found[0].seconds
    return Measured(
        model=subject.name,
        plan=name,
        ranks=plan.world_size,
        hash=plan.hash,
        turn=turn,
        started_at=started,
        steps_s=tuple(rank.steps_s for rank in found),
        step_s=max(statistics.median(rank.steps_s) for rank in found),
        seconds={k: statistics.mean(rank.seconds[k] for rank in found) for k in kinds},
        cpu_s=sum(rank.cpu_s for rank in found),
        base_bytes=tuple(rank.base_bytes for rank in found),
        resident_bytes=tuple(rank.resident_bytes for rank in found),
        tensor_bytes=tuple(r.tensor_bytes for r in found if r.tensor_bytes is not None),
    )


def _train(subject: Subject, graph: Graph, plan: Plan, warmup: int, steps: int) -> RankRun:
    model, batch = subject.model(), subject.batch()
    _touch()
    base = reset_peak()
    job = compile_job(model, plan, graph=graph, loss_fn=subject.loss_fn, lr=LEARNING_RATE)
    for _ in range(warmup):
        job.step(batch)
    dist.barrier()
    taken, processor_s = [], time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        job.step(batch)
        taken.append(time.perf_counter() - start)
    processor_s = time.process_time() - processor_s
    resident = peak_bytes()
    seconds = _by_kind(job.stats.steps[-steps:])
    job.close()
    return RankRun(tuple(taken), seconds, processor_s / steps, base, resident, _tensor_peak(job))


def _tensor_peak(job: Job) -> int | None:
    """Not recorded by the runtime yet."""
    return None


def _by_kind(records: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of a median step by kind."""
    names = {"forward": "F", "synchronise": "synchronise", "optimizer": "optimizer"}
    found = {
        kind: statistics.median(sum(r.action_s.get(work, ())) for r in records)
        for kind, work in names.items()
    }
    found["backward"] = statistics.median(
        sum(sum(r.action_s.get(work, ())) for work in "BIW") for r in records
    )
    found["wait"] = 0.0
    found["rest"] = statistics.median(r.step_s for r in records) - sum(found.values())
    return found


def machine() -> str:
    """Processor, cores and torch, for the report."""
    model = next(
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{model}, {torch.multiprocessing.cpu_count()} cores, torch {torch.__version__}, Gloo"
