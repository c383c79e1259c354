"""Where the seconds of a step go on one pipeline rank, and how uncertain they are."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot

from meshwright.costmodel.simulate.compiled_schedule import Table
from meshwright.costmodel.simulate.simulate import StageTimes
from meshwright.costmodel.simulate.step import StepTimes
from meshwright.ir.cluster.device import LINK_BAND
from meshwright.ir.plan.predicted import Breakdown

Seconds = dict[str, float]
"""By category."""
_OVERHEAD_BAND = 0.5
"""Relative error of what the runtime itself costs; assumption."""
_KEPT: dict[int, tuple[Table, tuple[Mapping[tuple[int, int], int], ...]]] = {}
_MOST = 128


def counts(table: Table) -> tuple[Mapping[tuple[int, int], int], ...]:
    """Per pipeline rank, how many actions of each (stage, kind) there are."""
    kept = _KEPT.get(id(table))
    if kept is None:
        while len(_KEPT) >= _MOST:
            del _KEPT[next(iter(_KEPT))]
        found = tuple(
            Counter((table.items[p].stage, table.items[p].kind) for p in row) for row in table.rows
        )
        kept = _KEPT[id(table)] = table, found
    return kept[1]


def breakdown(stepped: StepTimes, stages: Sequence[StageTimes], overhead_s: float) -> Breakdown:
    """Of the rank that waits least. `overhead_s`: of a step, outside its actions."""
    busy = stepped.timeline.busy_s
    filled = [b + e.total_s for b, e in zip(busy, stepped.ended, strict=True)]
    rank = max(range(len(filled)), key=filled.__getitem__)
    return breakdown_of(rank, stepped, stages, overhead_s)


def breakdown_of(
    rank: int, stepped: StepTimes, stages: Sequence[StageTimes], overhead_s: float
) -> Breakdown:
    """Of one pipeline rank."""
    timeline = stepped.timeline
    spent = _spent(timeline.table, stages, rank, timeline.busy_s[rank])
    ended = stepped.ended[rank]
    known = sum(spent.values()) + ended.total_s + overhead_s
    return Breakdown(
        rank=rank,
        forward_s=spent["forward"],
        backward_s=spent["backward"],
        recompute_s=spent["recompute"],
        tensor_s=spent["tensor"],
        wait_s=max(0.0, stepped.step_s + overhead_s - known),
        gradients_s=spent["gradients"] + ended.gradients_s,
        gather_s=spent["gather"] + ended.publish_s,
        optimizer_s=ended.optimizer_s,
        overhead_s=spent["overhead"] + overhead_s,
        offload_s=spent["offload"],
    )


def _spent(table: Table, stages: Sequence[StageTimes], rank: int, busy_s: float) -> Seconds:
    """Seconds of the rank's actions by category; they sum to `busy_s`."""
    spent: Seconds = defaultdict(float)
    jobs: Seconds = defaultdict(float)
    for (stage, kind), count in counts(table)[rank].items():
        program = stages[stage].program(kind)
        for what, seconds in program.own_by_what.items():
            spent[what] += count * seconds
        for what, seconds in program.jobs_by_what.items():
            jobs[what] += count * seconds
    for position in table.rows[rank]:
        if position in table.together:
            ahead, back = table.items[position], table.items[position + 1]
            hidden = stages[ahead.stage].together.get(back.stage)
            spent["tensor"] -= hidden.seconds if hidden else 0.0
    return _stretched(spent, jobs, busy_s)


def _stretched(spent: Seconds, jobs: Seconds, busy_s: float) -> Seconds:
    """The rest of the busy time goes to the channel's jobs, as far as they can explain it, and
    then to computing, which other processes or those jobs slow down."""
    rest = busy_s - sum(spent.values())
    waited = min(max(rest, 0.0), sum(jobs.values()))
    for what, seconds in jobs.items():
        spent[what] += waited * seconds / (sum(jobs.values()) or 1.0)
    slower = rest - waited
    computing = {"forward", "backward", "recompute", "overhead"}
    own = sum(spent[what] for what in computing)
    if slower > 0.0 and own:
        for what in computing:
            spent[what] *= 1.0 + slower / own
    return spent


@dataclass(frozen=True, slots=True)
class Bands:
    """Relative errors to expect."""

    compute: float
    """Of a micro-batch in the stages of the rank, with the collectives inside."""
    gradients: float
    gather: float
    optimizer: float


def error_band(found: Breakdown, bands: Bands) -> float:
    """Of the step: parts that are known apart err independently, waiting errs as computing."""
    computing = found.forward_s + found.backward_s + found.recompute_s + found.tensor_s
    others = found.gradients_s + found.gather_s + found.optimizer_s + found.overhead_s
    others += found.offload_s
    total = computing + others + found.wait_s
    return hypot(
        bands.compute * (computing + found.wait_s),
        bands.gradients * found.gradients_s,
        bands.gather * found.gather_s,
        bands.optimizer * found.optimizer_s,
        _OVERHEAD_BAND * found.overhead_s,
        LINK_BAND["datasheet"] * found.offload_s,
    ) / total if total else 0.0  # fmt: skip
