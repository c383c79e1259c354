"""What a run teaches a profile: records that replace or join those it rests on.

Of a stage's blocks only the sum is measured, so all its block records of one kind are scaled by
measured over expected, and half of the change is added to their spread: they need not all be off
alike. Memory of a process beyond its tensors is put down to what comes and goes with micro-batches.
A stage whose actions stand in collectives for much of their time teaches nothing about its
blocks, and a collective that hid behind computation nothing about its duration.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import mean, median

from meshwright.costmodel.explain.compare import Expected, added_bytes
from meshwright.costmodel.memory.fragmentation import fragmentation_on, record_names
from meshwright.ir.layout.op_messages import SHIFT
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import EARLY, Work
from meshwright.ir.profile.measured import ActionMeasured, CollectiveMeasured, Measured
from meshwright.ir.profile.profile import (
    BlockRecord,
    CollectiveRecord,
    GroupShape,
    MemoryRecord,
    OptimizerRecord,
    Profile,
    Timing,
)

_BLOCKED = 0.2
"""Share of an action in collectives beyond which it tells little about its blocks."""
_EXPOSED = 0.8
"""Share of a collective that the rank must have stood in, so that its duration is known."""

Learned = BlockRecord | CollectiveRecord | MemoryRecord | OptimizerRecord


@dataclass(frozen=True, slots=True)
class BlockUse:
    """A block of a stage."""

    key: str
    recomputed: bool


@dataclass(frozen=True, slots=True)
class _Change:
    """What a run says of some records: a factor, and how far apart its samples are."""

    factor: float
    spread: float


def learn(
    profile: Profile,
    plan: Plan,
    uses: Mapping[int, Sequence[BlockUse]],
    expected: Expected,
    runs: Sequence[Measured],
    shape: Callable[[int, str], tuple[GroupShape, int]],
    slow: float = 1.0,
) -> tuple[Learned, ...]:
    """New records of the machine that the run and the profile are of.

    `uses`: the blocks of each stage. `expected`: what this profile makes of the plan. `shape`: of a
    stage and an axis, the kind of group and how many of them work at once. `slow`: times by which
    ranks that step at once are slower than with a core each, which is what records are of.
    """
    return (
        *_blocks(profile, uses, expected, runs),
        *_collectives(runs, shape),
        *_optimizers(plan, runs, slow),
        *_memory(profile, plan, expected, runs),
    )


_FIELDS = {
    Work.FORWARD: ("forward",),
    Work.BACKWARD: ("backward",),
    Work.BACKWARD_INPUT: ("backward_input",),
    Work.BACKWARD_WEIGHT: ("backward_weight",),
    Work.FORWARD_KEEPING: ("forward",),
    Work.RECOMPUTE: ("forward",),
}


_ALONE = frozenset({Work.BACKWARD_WEIGHT, Work.FORWARD_KEEPING, Work.RECOMPUTE})


def _fields(work: Work, use: BlockUse, early: bool) -> tuple[str, ...]:
    """The timings of a block's record that an action of the kind consists of. `early`: backwards
    of the stage find all that they need."""
    if not use.recomputed or work in _ALONE:
        return _FIELDS[work]
    if work is Work.FORWARD:
        return ("no_grad_forward",)
    if early:
        return _FIELDS[work]
    return ("forward", *_FIELDS[work])


def _blocks(
    profile: Profile,
    uses: Mapping[int, Sequence[BlockUse]],
    expected: Expected,
    runs: Sequence[Measured],
) -> Iterator[BlockRecord]:
    changes: dict[tuple[str, str], list[_Change]] = defaultdict(list)
    by_action = _by_action(runs)
    early = {stage for stage, work in by_action if work in EARLY}
    for (stage, work), measured in by_action.items():
        change = _change(measured, expected.actions.get((stage, work)))
        known = [use for use in uses.get(stage, ()) if use.key in profile.blocks]
        if change is None or len(known) < len(uses.get(stage, ())):
            continue
        for use in set(known):
            for field in _fields(work, use, stage in early):
                changes[use.key, field].append(change)
    for key, record in profile.blocks.items():
        found = {field: changes[key, field] for k, field in changes if k == key}
        if found:
            yield _scaled(record, found)


def _by_action(runs: Sequence[Measured]) -> dict[tuple[int, Work], list[ActionMeasured]]:
    """Per stage and kind, what its ranks measured."""
    found: dict[tuple[int, Work], list[ActionMeasured]] = defaultdict(list)
    for m in runs:
        for action in m.actions:
            found[action.stage, action.work].append(action)
    return found


def _change(measured: Sequence[ActionMeasured], expected_s: float | None) -> _Change | None:
    """Of the slowest rank; None if the action tells nothing about its blocks."""
    slowest = max(measured, key=lambda a: a.busy.median_s)
    busy = slowest.busy
    if not expected_s or busy.median_s <= 0 or slowest.blocked.median_s > _BLOCKED * busy.median_s:
        return None
    return _Change(busy.median_s / expected_s, (busy.p90_s - busy.p10_s) / 2 / busy.median_s)


def _scaled(record: BlockRecord, changes: Mapping[str, Sequence[_Change]]) -> BlockRecord:
    found: dict[str, Timing] = {}
    for field, said in changes.items():
        old: Timing | None = getattr(record, field)
        if old is not None:
            factor = exp(mean(log(change.factor) for change in said))
            spread = max(old.spread, *(change.spread for change in said))
            found[field] = Timing(
                median_s=old.median_s * factor,
                spread=spread + abs(factor - 1) / 2,
                count=old.count + len(said),
            )
    return replace(record, **found)  # type: ignore[arg-type]


def _collectives(
    runs: Sequence[Measured], shape: Callable[[int, str], tuple[GroupShape, int]]
) -> Iterator[CollectiveRecord]:
    """Of ranks that take part in the same ones, the one that came last: it waited for nobody."""
    quickest: dict[tuple[GroupShape, int, str, int], CollectiveMeasured] = {}
    for m in runs:
        for c in m.collectives:
            if c.stage < 0 or c.primitive == SHIFT or c.exposed_s < _EXPOSED * c.median_s:
                continue
            key = (*shape(c.stage, c.axis), c.primitive, c.nbytes)
            best = quickest.get(key)
            if best is None or c.median_s < best.median_s:
                quickest[key] = c
    for (group, at_once, primitive, nbytes), c in quickest.items():
        yield CollectiveRecord(
            operation=primitive,
            nbytes=nbytes,
            group=group,
            groups_at_once=at_once,
            time=Timing(median_s=c.median_s, spread=c.spread, count=c.count),
        )


def _optimizers(plan: Plan, runs: Sequence[Measured], slow: float) -> Iterator[OptimizerRecord]:
    """One per size; of ranks with equal ones the middle."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for m in runs:
        if m.updated_tensors and "optimizer" in m.phases:
            found[m.updated_tensors, m.updated_bytes].append(m.phases["optimizer"].median_s / slow)
    for (tensors, nbytes), seconds in found.items():
        middle = median(seconds)
        spread = (max(seconds) - min(seconds)) / 2 / middle if middle else 0.0
        yield OptimizerRecord(
            optimizer=plan.optimizer,
            num_tensors=tensors,
            nbytes=nbytes,
            time=Timing(median_s=middle, spread=spread, count=len(seconds)),
        )


def _memory(
    profile: Profile, plan: Plan, expected: Expected, runs: Sequence[Measured]
) -> Iterator[MemoryRecord]:
    """The holes of the heap, by least squares over ranks; half a profile's record is no use."""
    stages = {rank: i for i, stage in enumerate(plan.stages) for rank in stage.devices}
    pairs = [
        (expected.moving[stages[m.rank]], added_bytes(m) - expected.added[stages[m.rank]])
        for m in runs
    ]
    squares = sum(moving**2 for moving, _ in pairs)
    if not squares:
        return
    model = plan.model.fingerprint
    known = fragmentation_on(profile.machine.kind, profile, model)
    more = sum(moving * missing for moving, missing in pairs) / squares
    values = max(0.0, known.moving + more), known.gradients
    for name, value in zip(record_names(model), values, strict=True):
        yield MemoryRecord(name=name, value=value, unit="ratio")
