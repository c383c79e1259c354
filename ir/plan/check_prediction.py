"""Whether a prediction is one of its plan: as many stages and ranks, and nothing that is missing.

Reports, tables and traces read it with indices of the plan.
"""

from collections.abc import Iterator
from dataclasses import fields

from meshwright.ir.plan.detail import Detail, StageDetail
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Breakdown, Prediction
from meshwright.ir.plan.schedule import EARLY, Schedule, Work

_BACKWARDS = ("B", "B first", "B last", "B first last")
RISES = ("F", "I", *_BACKWARDS)
"""Of what a stage's detail says how much memory rises."""
EARLY_RISES = ("K", "R", "I held", *(f"{name} held" for name in _BACKWARDS))
"""The same where the schedule keeps or makes again."""
SECOND_RISES = tuple(name.replace("B", "W") for name in _BACKWARDS)
"""The same of second halves of backwards."""
ACTIONS = ("F", "B", "I", "W", "B last", "W last", "K", "R", "B held", "I held", "B held last")
"""Whose seconds a stage's detail may have."""


def prediction_problems(plan: Plan, schedule: Schedule | None) -> Iterator[str]:
    """What a reader of the prediction would stumble over; `schedule`: that of the plan, if it is
    sound."""
    predicted = plan.predicted
    if predicted is None:
        return
    if len(predicted.stages) != len(plan.stages):
        counts = f"{len(predicted.stages)} stages for {len(plan.stages)}"
        yield f"the prediction is for another plan: {counts}"
        return
    yield from _counts(plan, predicted)
    if predicted.detail and schedule and schedule.num_stages == len(plan.stages):
        yield from _stages(predicted.detail, schedule)


def _counts(plan: Plan, predicted: Prediction) -> Iterator[str]:
    ranks, detail = len(plan.schedule.rows), predicted.detail
    if predicted.breakdown and not 0 <= predicted.breakdown.rank < ranks:
        yield f"breakdown is of pipeline rank {predicted.breakdown.rank}, there are {ranks}"
    if detail is None:
        return
    if len(detail.ranks) != ranks:
        yield f"detail has {len(detail.ranks)} pipeline ranks, the schedule has {ranks}"
    categories = {field.name.removesuffix("_s") for field in fields(Breakdown)} - {"rank"}
    if strange := sorted({name for own in detail.ranks for name in own.seconds} - categories):
        yield f"detail has seconds of {strange[0]!r}; there are {', '.join(sorted(categories))}"
    if len(detail.stages) != len(plan.stages):
        yield f"detail has {len(detail.stages)} stages, the plan has {len(plan.stages)}"
    outside = [kind for kind in detail.stages if not 0 <= kind < len(detail.kinds)]
    if outside:
        yield f"detail names kind {outside[0]} of stages, there are {len(detail.kinds)}"
    covered = sorted((run.first, run.first + run.count) for run in detail.devices)
    last = max(rank for stage in plan.stages for rank in stage.devices)
    end = 0
    for first, after in covered:
        if first > end:
            break
        end = max(end, after)
    if end <= last:
        yield f"detail describes devices up to {end - 1}, the plan uses device {last}"


def _stages(detail: Detail, schedule: Schedule) -> Iterator[str]:
    works: dict[int, set[Work]] = {}
    for row in schedule.ranks:
        for action in row:
            works.setdefault(action.stage, set()).add(action.work)
    seen: set[tuple[int, frozenset[Work]]] = set()
    for stage, kind in enumerate(detail.stages):
        does = frozenset(works.get(stage, ()))
        if kind < len(detail.kinds) and (kind, does) not in seen:
            seen.add((kind, does))
            yield from _stage(f"detail of stage {stage}", detail.kinds[kind], does)
            others = sorted(detail.kinds[kind].pairs.keys() - set(map(str, works)))
            if others:
                yield f"detail of stage {stage} has pairs with stage {others[0]!r}"


def _stage(where: str, kind: StageDetail, does: frozenset[Work]) -> Iterator[str]:
    needed = (*RISES, *EARLY_RISES) if does & EARLY else RISES
    if "W" in kind.rises:
        needed = (*needed, *SECOND_RISES)
    if "W held" in kind.rises:
        needed = (*needed, *(f"{name} held" for name in SECOND_RISES))
    if missing := [name for name in needed if name not in kind.rises]:
        yield f"{where} does not say how memory rises in {missing[0]}"
    if strange := [name for name in (*kind.actions, *kind.collectives) if name not in ACTIONS]:
        yield f"{where} has seconds of {strange[0]!r}; there are {', '.join(ACTIONS)}"
    timed = {name.partition(" ")[0] for name in kind.actions}
    if untimed := sorted(work for work in does if work not in timed):
        yield f"{where} has no seconds of {untimed[0]}, which the schedule has"
