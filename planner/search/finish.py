"""What is tried on the best plans when a searcher is done: the files of `planner/finishing`, and
values of pins (`Decision.tries`).

Each yields variants of a plan. What searchers enumerate stays small that way, and every searcher
gains alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import Plan
from meshwright.planner import finishing
from meshwright.planner.pins.constraints import pins_of
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.problem.predict import excess_bytes, predict_plan
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.deadline import check_time
from meshwright.planner.search.notes import annotated

_FILES = Files(finishing, "change")
FINISHERS = _FILES.names
"""Keys of the changes: the file names."""
BEST, CLOSE = 3, 1.3
"""Plans, the best of their kind, that are finished: so many, and those within this factor of the
best step."""


def variants(name: str, problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Variants of a plan by `planner/finishing/<name>.py`, each with its prediction."""
    yield from _FILES.load(name).variants(problem, plan)


def finished(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Each variant that was tried, change after change on what is best by then."""
    best = plan
    pins = [name for name, decision in DECISIONS.items() if decision.tries]
    for tried in [*(partial(variants, n) for n in FINISHERS), *(partial(_under, n) for n in pins)]:
        for variant in tried(problem, best):
            yield variant
            if _is_better(problem, variant, best):
                best = variant


def _under(name: str, problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with each value of a decision that pins leave, where that changes it."""
    decision = DECISIONS[name]
    assert decision.apply is not None
    for value in decision.tries:
        if all(pin.admits(value) for pin in pins_of(problem.constraints, name)):
            table = partial(problem.tables.schedule, plan.schedule)
            stages = tuple([decision.apply(stage, value, table) for stage in plan.stages])
            if stages != plan.stages:
                yield changed(problem, plan, stages=stages)


def _is_better(problem: Problem, plan: Plan, than: Plan) -> bool:
    assert plan.predicted and than.predicted
    key = excess_bytes(problem, plan), plan.predicted.step_s
    return key < (excess_bytes(problem, than), than.predicted.step_s)


def changed(problem: Problem, plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields, predicted anew."""
    check_time()
    plan = replace(plan, **changes)
    plan = annotated(problem, plan)
    return replace(plan, predicted=predict_plan(problem, plan))
