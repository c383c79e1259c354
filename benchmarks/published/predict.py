"""Predicts one row: step time by the event simulator, peak memory by what each stage holds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.published.measured import RowError
from benchmarks.published.memory import Memory, memory_of
from benchmarks.published.recipes import Recipe, recipe_of
from benchmarks.published.rows import Row
from benchmarks.published.sites import Ground, ground_of
from benchmarks.published.stages import Part, site_of, stages_of
from benchmarks.published.sync import Extra, extra_of, tied_s
from benchmarks.published.systems import system_of
from meshwright.costmodel.comm.comm import Level, collective_time, send_time
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.schedules import gpipe, interleaved, one_f_one_b, zbv, zero_bubble

_SCHEDULES = {
    "1f1b": one_f_one_b, "one_f_one_b": one_f_one_b, "interleaved": interleaved,
    "interleaved1f1b": interleaved, "gpipe": gpipe, "zbv": zbv, "zbvzerobubble": zbv,
    "interleavedzerobubble": interleaved, "zb1p": zero_bubble, "zero_bubble": zero_bubble,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prediction:
    """What we expect of a row."""

    step_s: float
    memory: Memory
    system: str


def predict(row: Row) -> Prediction:
    """RowError where the row needs something that is not modelled."""
    recipe = recipe_of(row, system_of(row))
    ground = ground_of(row)
    parts = stages_of(row, recipe, ground)
    extras = [extra_of(row, recipe, ground, part) for part in parts]
    send_s = stage_send_s(row, recipe, ground) if row.parallel.pp > 1 else 0.0
    if recipe.system.sends_wait:
        extras = [waiting(extra, part, send_s) for extra, part in zip(extras, parts, strict=True)]
    timeline = _timeline(row, recipe.system.schedule, parts, extras, send_s)
    ends = [0.0] * len(parts)
    for position, item in enumerate(timeline.table.items):
        ends[item.stage] = max(ends[item.stage], timeline.ran.ends[position])
    tied = tied_s(row, len(parts), ground, (Level(2, ground.send),))
    step_s = max(
        end + extra.first_forward_s + extra.after_s + tied
        for end, extra in zip(ends, extras, strict=True)
    )
    return Prediction(step_s, memory_of(row, recipe, ground, parts, timeline), recipe.system.name)


def waiting(extra: Extra, part: Part, send_s: float) -> Extra:
    """A stage that stands still while it sends what the next ones wait for."""
    return replace(
        extra,
        per_forward_s=extra.per_forward_s + (0.0 if part.last else send_s),
        per_backward_s=extra.per_backward_s + (0.0 if part.first else send_s),
    )


def stage_send_s(row: Row, recipe: Recipe, ground: Ground) -> float:
    """Of a micro-batch's activations to the next stage."""
    site = site_of(row, recipe)
    nbytes = 2 * site.shared * row.shape.hidden
    whole = send_time(nbytes, ground.send)
    if not recipe.system.sends_parts or site.sp or site.tp == 1:
        return whole
    gather = collective_time(Primitive.ALL_GATHER, nbytes, ground.tp)
    return min(whole, send_time(nbytes / site.tp, ground.send) + gather)


def _timeline(
    row: Row, usual: str, parts: Sequence[Part], extras: Sequence[Extra], send_s: float
) -> Timeline:
    times = tuple(
        StageTimes(
            forward_s=part.cost.forward + extra.per_forward_s,
            backward_s=part.cost.backward + extra.per_backward_s,
            backward_input_s=(part.cost.backward + extra.per_backward_s) / 2,
            backward_weight_s=(part.cost.backward + extra.per_backward_s) / 2,
            send_s=send_s,
            saved_bytes=part.cost.saved_bytes,
        )
        for part, extra in zip(parts, extras, strict=True)
    )
    name = (row.parallel.schedule or usual).lower()
    if name not in _SCHEDULES:
        raise RowError(f"no schedule {name!r}; known are {', '.join(_SCHEDULES)}")
    if len(parts) == row.parallel.pp and "interleaved" in name:
        name = "1f1b"
    return simulate(_schedule(name, len(parts), row.microbatches, row.parallel.pp), times)


@lru_cache(maxsize=64)
def _schedule(name: str, stages: int, microbatches: int, ranks: int) -> Schedule:
    made: Schedule = _SCHEDULES[name].schedule(stages, microbatches, ranks)
    return made
