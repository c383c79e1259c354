"""What goes on beside collectives of model axes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import HALVING, OVERLAPS, Overlap, Plan, Stage
from meshwright.ir.plan.schedule import Schedule, halves_backwards
from meshwright.planner.finishing import early_recompute
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.pins.decision import Decision, Machinery
from meshwright.planner.pins.decisions import Pin, Value
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL, make_schedule, plan_table
from meshwright.planner.search.finish import changed

_NONE = "none"


def _admits(pin: Pin, stage: Stage) -> bool:
    return stage.model_size == 1 or pin.admits(stage.overlap)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where it has an effect."""
    if stage.model_size == 1 or halves_backwards(table()) or table().pairs:
        return stage
    return replace(stage, overlap=next(level for level in OVERLAPS if level == value))


def _variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Each level that pins leave, in every stage with model axes; where the schedule has halves of
    backwards, under others."""
    if all(stage.model_size == 1 for stage in plan.stages) or paired_stages(plan):
        return
    bases = [plan]
    if halves_backwards(problem.tables.schedule(plan.schedule)):
        bases = list(_with_whole_backwards(problem, plan))
    left = set(allowed(problem.constraints, "overlap", OVERLAPS[1:]))
    for base in bases:
        for level in (level for level in OVERLAPS[1:] if level in left):
            found = overlapped(problem, base, level)
            if found is not base:
                yield found


def _with_whole_backwards(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Under the usual schedule, and the best of those that say when to recompute."""
    ranks = len(plan.schedule.rows)
    if ranks != len(plan.stages):
        return
    if allowed(problem.constraints, "schedule", (USUAL,)):
        made = make_schedule(USUAL, ranks, plan.num_microbatches, ranks)
        yield replace(plan, schedule=plan_table(USUAL, made))
    early = [
        other
        for other in early_recompute.variants(problem, plan)
        if not halves_backwards(problem.tables.schedule(other.schedule))
    ]
    if early:
        yield min(early, key=lambda other: (excess_bytes(problem, other), _step_s(other)))


def _step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def overlapped(problem: Problem, plan: Plan, level: Overlap) -> Plan:
    """The plan with a level; itself if it has it already."""
    stages = tuple(
        replace(stage, overlap=level) if stage.model_size > 1 else stage for stage in plan.stages
    )
    return plan if stages == plan.stages else changed(problem, plan, stages=stages)


def _words(plan: Plan) -> list[str]:
    return sorted({f"overlap {s.overlap}" for s in plan.stages if s.overlap != _NONE})


def _notes(problem: Problem, plan: Plan) -> Iterator[str]:
    if _words(plan):
        yield "other work goes on beside collectives of blocks; the bound is of plans without that"


def _halves(plan: Plan) -> int:
    return int(any(stage.overlap in HALVING for stage in plan.stages))


DECISION = Decision(
    words=OVERLAPS,
    scope="plan",
    read=lambda plan, stage: stage.overlap,
    admits=_admits,
    apply=_apply,
    variants=_variants,
    notes=_notes,
    place=7,
    words_of=_words,
    machinery=Machinery(5, _halves),
    show=lambda stage: "-" if stage.overlap == _NONE else stage.overlap,
)
