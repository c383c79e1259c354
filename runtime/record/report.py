"""Sums up what the steps of one rank took."""

import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import median
from typing import get_args

import torch

from meshwright.ir.comm.collective import What
from meshwright.ir.launch import TAKEN
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import content_hash
from meshwright.ir.plan.schedule import Action, Work
from meshwright.ir.profile.measured import (
    ActionMeasured,
    CacheMeasured,
    CollectiveMeasured,
    KernelMeasured,
    Measured,
    MemoryMeasured,
    Phase,
    Spread,
    StepMeasured,
    TensorMemory,
    TimedAction,
    TimedMessage,
    TimelineMeasured,
    TunedBuckets,
)
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.job.machine import machine
from meshwright.runtime.record.record import Passed, StepRecord
from meshwright.runtime.record.resident import Residence
from meshwright.runtime.record.stats import Stats, Taken


def report(
    stats: Stats,
    residence: Residence,
    tensors: TensorMemory | None,
    plan: Plan,
    parts: RankParts,
    device: torch.device,
    tuned: TunedBuckets | None = None,
) -> Measured:
    """All that was measured on this rank."""
    records = stats.records
    updated = [h.tensor for h in parts.held if h.param.requires_grad and h.tensor.numel()]
    return Measured(
        plan=content_hash(plan),
        rank=parts.rank,
        world_size=plan.world_size,
        machine=machine(device),
        host=socket.gethostname(),
        steps=_steps(stats),
        actions=_actions(records),
        collectives=_collectives(records),
        phases=_phases(records),
        updated_tensors=len(updated),
        updated_bytes=sum(x.nbytes for x in updated),
        memory=_memory(residence, tensors, device),
        timeline=_timeline(stats),
        kernels=_kernels(stats),
        tuned=tuned,
        caches=tuple(
            CacheMeasured(
                table=one.path, slots=one.slots, rows=one.rows, here=one.here, written=one.written
            )
            for stage in parts.stages.values()
            for one in stage.sync.found
        ),
        detailed=len(records),
    )


def _kernels(stats: Stats) -> tuple[KernelMeasured, ...]:
    """Which way calls of kernels went, as far as they are this job's."""
    return tuple(
        KernelMeasured(kernel=kernel, way="torch" if why else "triton", why=why, calls=calls)
        for (kernel, why), calls in sorted((TAKEN - stats.called).items())
    )


def _memory(
    residence: Residence, tensors: TensorMemory | None, device: torch.device
) -> MemoryMeasured:
    cuda = device.type == "cuda"
    return MemoryMeasured(
        tensors=tensors,
        resident_before_bytes=residence.before_bytes,
        resident_start_bytes=residence.start_bytes,
        resident_peak_bytes=residence.note(),
        cuda_allocated_bytes=torch.cuda.max_memory_allocated(device) if cuda else None,
        cuda_reserved_bytes=torch.cuda.max_memory_reserved(device) if cuda else None,
    )


def spread(seconds: Iterable[float]) -> Spread:
    """Median, 10th and 90th percentile, by nearest rank."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Spread(
        median_s=median(ordered),
        p10_s=ordered[round(0.1 * last)],
        p90_s=ordered[round(0.9 * last)],
    )


def _steps(stats: Stats) -> tuple[StepMeasured, ...]:
    return tuple(
        StepMeasured(kind=taken.kind, step_s=taken.step_s, loss=_loss(taken))
        for taken in stats.taken
    )


def _loss(taken: Taken) -> float | None:
    return taken.loss if taken.loss is not None and isfinite(taken.loss) else None


def _actions(records: Sequence[StepRecord]) -> tuple[ActionMeasured, ...]:
    """Per stage and kind of work."""
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = defaultdict(list)
    for record in records:
        waiting, blocked = record.idle()
        for index, (name, start_s, end_s) in enumerate(record.sections):
            if isinstance(name, Action):
                busy = end_s - start_s - waiting[index]
                found[name.stage, name.work].append((busy, waiting[index], blocked[index]))
    return tuple(_action(*key, seconds) for key, seconds in sorted(found.items()))


def _action(stage: int, work: str, seconds: list[tuple[float, float, float]]) -> ActionMeasured:
    busy, waiting, blocked = (spread(part) for part in zip(*seconds, strict=True))
    return ActionMeasured(
        stage=stage, work=Work(work), count=len(seconds), busy=busy, waiting=waiting,
        blocked=blocked,
    )  # fmt: skip


def _collectives(records: Sequence[StepRecord]) -> tuple[CollectiveMeasured, ...]:
    """Equal ones together, the costliest first."""
    found: dict[What, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        for done in record.collectives:
            found[done.what].append((done.end_s - done.start_s, done.end_s - done.blocked_s))
    made = [_collective(what, seconds) for what, seconds in found.items()]
    return tuple(sorted(made, key=lambda c: -c.total_s))


def _collective(what: What, seconds: list[tuple[float, float]]) -> CollectiveMeasured:
    whole, exposed = zip(*seconds, strict=True)
    found = spread(whole)
    if what.form and what.primitive == Primitive.ALL_TO_ALL:
        what = what._replace(nbytes=what.nbytes * what.size)
    return CollectiveMeasured(
        **what._asdict(),
        count=len(seconds),
        median_s=found.median_s,
        spread=(found.p90_s - found.p10_s) / 2 / found.median_s if found.median_s else 0.0,
        exposed_s=median(exposed),
        total_s=sum(exposed),
    )


def _phases(records: Sequence[StepRecord]) -> dict[Phase, Spread]:
    """Per phase its seconds in a step."""
    found: dict[Phase, list[float]] = {}
    for phase in get_args(Phase):
        per_step = [
            sum(s.end_s - s.start_s for s in record.sections if s.name == phase)
            for record in records
        ]
        if per_step:
            found[phase] = per_step
    return {phase: spread(seconds) for phase, seconds in found.items()}


def _timeline(stats: Stats) -> TimelineMeasured | None:
    """The last timed step."""
    if not stats.records:
        return None
    record = stats.records[-1]
    waiting, _ = record.idle()
    timed = [
        TimedAction(name=str(s.name), start_s=s.start_s, end_s=s.end_s, waiting_s=waiting[index])
        for index, s in enumerate(record.sections)
    ]
    return TimelineMeasured(
        step=max(i for i, taken in enumerate(stats.taken) if taken.kind == "timed"),
        started_s=record.started_s,
        actions=tuple(sorted(timed, key=lambda action: (action.start_s, -action.end_s))),
        messages=tuple(_message(passed) for passed in (*record.waits, *record.sends)),
    )


def _message(passed: Passed) -> TimedMessage:
    message = passed.message
    return TimedMessage(
        border=message.border,
        microbatch=message.microbatch,
        gradient=message.gradient,
        value=message.value,
        source=message.source,
        target=message.target,
        nbytes=passed.nbytes,
        start_s=passed.start_s,
        end_s=passed.end_s,
    )
