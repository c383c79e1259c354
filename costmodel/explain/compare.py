"""Sets what a plan was expected to take beside what a run of it took."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Literal

from meshwright.costmodel.explain.sent import ComparedBytes, compared_bytes
from meshwright.costmodel.simulate.replay import replay
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.ir.errors import MismatchError, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import older_hash
from meshwright.ir.plan.predicted import RankMemory
from meshwright.ir.plan.schedule import Work
from meshwright.ir.plan.verify import check
from meshwright.ir.profile.measured import CollectiveMeasured, KernelMeasured, Measured, Phase

Group = Literal["step", "action", "waiting", "collective", "synchronisation", "optimizer", "memory"]
_SHARE = 0.01
"""What takes less of a step than this is listed last, however wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One figure, in seconds or bytes."""

    group: Group
    what: str
    unit: Literal["s", "bytes"]
    predicted: float | None
    """None where the prediction does not say."""
    measured: float
    per_step_s: float = 0.0
    """Measured seconds of all of them in a step."""

    @property
    def error(self) -> float | None:
        """Relative: 0.1 means that the prediction is 10 % too high."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """Which collectives of a run are alike."""

    purpose: str
    stage: int
    axis: str
    primitive: str
    nbytes: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a prediction says, as far as it is known."""

    step_s: float
    error_band: float
    actions: Mapping[tuple[int, Work], float]
    """Seconds of an action while it has its inputs, by stage."""
    waiting: Mapping[int, float]
    """Seconds per step that a stage's ranks wait for other stages."""
    collectives: Mapping[CollectiveKind, float]
    synchronisation: Mapping[int, float]
    optimizer: Mapping[int, float]
    tensors: Mapping[int, Mapping[str, int]]
    """Per stage, bytes at the peak by category, and `all`."""
    before: Mapping[int, int]
    """Per stage, bytes of a process before it makes the job, where that is known."""
    added: Mapping[int, int]
    """Per stage, bytes that the job adds to it."""
    moving: Mapping[int, int]
    """Per stage, bytes of what comes and goes with micro-batches, at the peak."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The worst first; what hardly matters for the step last."""

    plan: str
    error_band: float
    step: ComparedFigure
    rows: tuple[ComparedFigure, ...]
    kernels: tuple[KernelMeasured, ...] = ()
    """Which way calls of fused kernels went, on all ranks together."""
    sent: tuple[ComparedBytes, ...] = ()
    """What a rank sends in a step."""

    @property
    def inside(self) -> bool:
        """Whether the step time is within the band that the prediction states."""
        error = self.step.error
        return error is not None and abs(error) <= self.error_band

    @property
    def verdict(self) -> str:
        """One line."""
        assert self.step.predicted is not None and self.step.error is not None
        return (
            f"step {self.step.predicted:.4g} s predicted, {self.step.measured:.4g} s measured: "
            f"{self.step.error:+.1%}, {'inside' if self.inside else 'OUTSIDE'} the stated "
            f"{self.error_band:.0%}"
        )


def expected_of(plan: Plan) -> Expected:
    """What the plan itself says. Without detail its action times are those of a rank with a core
    of its own."""
    if plan.predicted is None:
        raise PlanError("the plan has no prediction; search writes one")
    check(plan)
    stages = tuple(enumerate(plan.predicted.stages))
    works = {action.work for row in plan.schedule.parse().ranks for action in row}
    times = {(i, Work.FORWARD): s.forward_s for i, s in stages}
    if Work.BACKWARD in works:
        times |= {(i, Work.BACKWARD): s.backward_s for i, s in stages}
    waits: dict[int, float] = {}
    if plan.predicted.detail:
        timeline = replay(plan).timeline
        times, waits = durations(timeline), waiting(timeline)
    return Expected(
        step_s=plan.predicted.step_s,
        error_band=plan.predicted.error_band,
        actions=times,
        waiting=waits,
        collectives={},
        synchronisation={i: s.sync_s for i, s in stages},
        optimizer={i: s.optimizer_s for i, s in stages},
        tensors={i: _tensors(plan, i) for i, _ in stages},
        before={i: s.memory.process_bytes for i, s in stages if s.memory.process_bytes},
        added={i: s.memory.used_bytes for i, s in stages},
        moving={i: _moving(s.memory) for i, s in stages},
    )


def _moving(memory: RankMemory) -> int:
    return memory.activations_bytes + memory.communication_bytes + memory.workspace_bytes


def durations(timeline: Timeline) -> dict[tuple[int, Work], float]:
    found: dict[tuple[int, Work], list[float]] = defaultdict(list)
    for row in timeline.entries:
        for action, start_s, end_s in row:
            found[action.stage, action.work].append(end_s - start_s)
    return {key: mean(seconds) for key, seconds in found.items()}


def waiting(timeline: Timeline) -> dict[int, float]:
    """An action waits from the end of the one before it on its rank."""
    found: dict[int, float] = defaultdict(float)
    for row in timeline.entries:
        before = 0.0
        for action, start_s, end_s in row:
            found[action.stage] += start_s - before
            before = end_s
    return dict(found)


def _tensors(plan: Plan, stage: int) -> dict[str, int]:
    assert plan.predicted is not None
    memory = plan.predicted.stages[stage].memory
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "inputs": memory.inputs_bytes,
        "rest": memory.activations_bytes + memory.communication_bytes + memory.workspace_bytes,
        "all": memory.tensor_bytes,
        "host": memory.host_bytes,
    }


def check_run(plan: Plan, runs: Sequence[Measured]) -> None:
    """MismatchError unless the run is of this plan; PlanError if it has no timed step."""
    known = (plan.hash, older_hash(plan))
    other = next((m.plan for m in runs if m.plan not in known), None)
    if other is not None:
        raise MismatchError(
            f"the run is of plan {other[:12]}, this is plan {plan.hash[:12]}; "
            "compare it with the plan.json of its own folder"
        )
    if len(runs) != plan.world_size:
        raise MismatchError(f"the run is of {len(runs)} ranks, the plan of {plan.world_size}")
    if not all(m.timed_steps for m in runs):
        raise PlanError("the run has no timed step (the first is to warm up); run more steps")


def compare(plan: Plan, expected: Expected, runs: Sequence[Measured]) -> Comparison:
    """Of ranks that do the same, the slowest counts; of those that wait for each other, the last.

    The rank that comes last to a collective waits for nobody: what it needs is the collective's.
    """
    check_run(plan, runs)
    step_s = max(median(s.step_s for s in m.steps if s.kind == "timed") for m in runs)
    step = ComparedFigure(
        group="step", what="step", unit="s", predicted=expected.step_s, measured=step_s,
        per_step_s=step_s,
    )  # fmt: skip
    rows = [*_actions(expected, runs), *_collectives(expected, runs)]
    for devices, stages in _held(plan).items():
        rows += _ranks(expected, stages, [runs[rank] for rank in devices])

    def order(row: ComparedFigure) -> tuple[bool, bool, float]:
        small = row.unit == "s" and row.per_step_s < _SHARE * step_s
        return row.error is None, small, -abs(row.error or 0.0)

    return Comparison(
        plan=plan.hash,
        error_band=expected.error_band,
        step=step,
        rows=tuple(sorted(rows, key=order)),
        kernels=_kernels(runs),
        sent=compared_bytes(plan, runs),
    )


def _kernels(runs: Sequence[Measured]) -> tuple[KernelMeasured, ...]:
    found: dict[KernelMeasured, int] = {}
    for one in (kernel for m in runs for kernel in m.kernels):
        key = replace(one, calls=0)
        found[key] = found.get(key, 0) + one.calls
    return tuple(replace(key, calls=calls) for key, calls in found.items())


def _actions(expected: Expected, runs: Sequence[Measured]) -> Iterator[ComparedFigure]:
    slowest: dict[tuple[int, Work], tuple[float, float]] = {}
    for m in runs:
        for action in m.actions:
            key = action.stage, action.work
            busy = action.busy.median_s
            found = busy, busy * action.count / m.detailed_steps
            slowest[key] = max(found, slowest.get(key, (0.0, 0.0)))
    for (stage, work), (busy, per_step_s) in sorted(slowest.items()):
        yield ComparedFigure(
            group="action", what=f"stage {stage} {work}", unit="s",
            predicted=expected.actions.get((stage, work)), measured=busy, per_step_s=per_step_s,
        )  # fmt: skip


def _collectives(expected: Expected, runs: Sequence[Measured]) -> Iterator[ComparedFigure]:
    quickest: dict[CollectiveKind, tuple[float, float]] = {}
    for m in runs:
        for c in m.collectives:
            found = c.median_s, c.total_s / m.detailed_steps
            key = kind_of(c)
            quickest[key] = min(found, quickest.get(key, found))
    for kind, (seconds, per_step_s) in quickest.items():
        where = f"stage {kind.stage}" if kind.stage >= 0 else "job"
        yield ComparedFigure(
            group="collective",
            what=f"{where} {kind.purpose} {kind.primitive} {kind.nbytes} B on {kind.axis}",
            unit="s", predicted=expected.collectives.get(kind), measured=seconds,
            per_step_s=per_step_s,
        )  # fmt: skip


def kind_of(c: CollectiveMeasured) -> CollectiveKind:
    return CollectiveKind(c.purpose, c.stage, c.axis, c.primitive, c.nbytes, c.size)


def _held(plan: Plan) -> dict[tuple[int, ...], list[int]]:
    """Devices -> the stages that they run."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        found.setdefault(stage.devices, []).append(index)
    return found


def _ranks(
    expected: Expected, stages: Sequence[int], runs: Sequence[Measured]
) -> Iterator[ComparedFigure]:
    """What ranks do once in a step for all the stages that they hold."""
    where = f"stage {'+'.join(map(str, stages))}"
    waiting = min(_waiting(m) for m in runs)
    sync = min(_phase(m, "gradients") + _phase(m, "publish") for m in runs)
    optimizer = max(_phase(m, "optimizer") for m in runs)
    yield _seconds("waiting", where, _sum(expected.waiting, stages), waiting)
    yield _seconds("synchronisation", where, _sum(expected.synchronisation, stages), sync)
    yield _seconds("optimizer", where, _sum(expected.optimizer, stages), optimizer)
    yield from _memory(expected, where, stages[0], runs)


def _sum(by_stage: Mapping[int, float], stages: Sequence[int]) -> float | None:
    known = [by_stage[index] for index in stages if index in by_stage]
    return sum(known) if known else None


def _seconds(group: Group, what: str, predicted: float | None, measured: float) -> ComparedFigure:
    """Of something that happens once in a step."""
    return ComparedFigure(
        group=group, what=what, unit="s", predicted=predicted, measured=measured,
        per_step_s=measured,
    )  # fmt: skip


def _waiting(m: Measured) -> float:
    """Seconds per step."""
    return sum(a.waiting.median_s * a.count for a in m.actions) / m.detailed_steps


def _phase(m: Measured, phase: Phase) -> float:
    return m.phases[phase].median_s if phase in m.phases else 0.0


def _memory(
    expected: Expected, where: str, index: int, runs: Sequence[Measured]
) -> Iterator[ComparedFigure]:
    """Of the rank with the highest peak; a prediction is that of all that the rank holds."""
    tracked = [m.memory.tensors for m in runs if m.memory.tensors is not None]
    if tracked:
        most = max(tracked, key=lambda t: t.peak_bytes)
        for category, measured in (
            ("all", most.peak_bytes),
            ("parameters", most.parameters_bytes),
            ("gradients", most.gradients_bytes),
            ("optimizer", most.optimizer_bytes),
            ("inputs", most.inputs_bytes),
            ("rest", most.rest_bytes),
        ):
            predicted = expected.tensors.get(index, {}).get(category)
            yield _bytes(f"{where} tensors, {category}", predicted, measured)
        hosted = expected.tensors.get(index, {}).get("host")
        if hosted or most.host_bytes:
            yield _bytes(f"{where} tensors, on the host", hosted, most.host_bytes)
    if not any(m.memory.cuda_reserved_bytes for m in runs):
        # What a GPU's driver holds for a process is not in what torch reserves.
        base = max(m.memory.resident_before_bytes for m in runs)
        yield _bytes(f"{where} process, before the job", expected.before.get(index), base)
    added = max(added_bytes(m) for m in runs)
    yield _bytes(f"{where} process, added by the job", expected.added.get(index), added)


def added_bytes(m: Measured) -> int:
    """What the job adds to its process: on a GPU all that torch reserves, on a CPU what is resident
    beyond what was there before (libraries, the user's own module and data)."""
    memory = m.memory
    return memory.cuda_reserved_bytes or (memory.resident_peak_bytes - memory.resident_before_bytes)


def _bytes(what: str, predicted: int | None, measured: int) -> ComparedFigure:
    return ComparedFigure(
        group="memory", what=what, unit="bytes", predicted=predicted, measured=measured
    )
