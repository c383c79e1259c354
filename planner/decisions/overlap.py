"""What goes on beside collectives of model axes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.ir.plan.plan import OVERLAPS, Plan, Stage
from meshwright.ir.plan.schedule import Schedule, halves_backwards
from meshwright.planner.pins.decision import Decision, Machinery
from meshwright.planner.pins.decisions import Pin, Value
from meshwright.planner.problem.problem import Problem

_NONE = "none"


def _admits(pin: Pin, stage: Stage) -> bool:
    return stage.model_size == 1 or pin.admits(stage.overlap)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where it has an effect."""
    if stage.model_size == 1 or halves_backwards(table()):
        return stage
    return replace(stage, overlap=next(level for level in OVERLAPS if level == value))


def _words(plan: Plan) -> list[str]:
    return sorted({f"overlap {s.overlap}" for s in plan.stages if s.overlap != _NONE})


def _notes(problem: Problem, plan: Plan) -> Iterator[str]:
    if _words(plan):
        yield "other work goes on beside collectives of blocks; the bound is of plans without that"


def _halves(plan: Plan) -> int:
    return int(any(stage.overlap in ("block", "blocks") for stage in plan.stages))


DECISION = Decision(
    words=OVERLAPS,
    scope="plan",
    read=lambda plan, stage: stage.overlap,
    admits=_admits,
    apply=_apply,
    notes=_notes,
    place=7,
    words_of=_words,
    machinery=Machinery(5, _halves),
    show=lambda stage: "-" if stage.overlap == _NONE else stage.overlap,
)
