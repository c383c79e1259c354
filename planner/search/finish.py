"""What is tried on the best plans when a searcher is done: by files of pins (`Decision.tries`,
`Decision.variants`) and by those of `planner/finishing`.

Each yields variants of a plan. What searchers enumerate stays small that way, and every searcher
gains alike.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

from meshwright.ir.deadline import check_time
from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import Plan
from meshwright.planner import finishing
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.problem.predict import excess_bytes, settled
from meshwright.planner.problem.problem import Problem

_FILES = Files(finishing, "change")
BEST, CLOSE = 3, 1.3
"""Plans, the best of their kind, that are finished: so many, and those within this factor of the
best step."""


def variants(name: str, problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Variants of a plan by a pin or by `planner/finishing/<name>.py`, each with its prediction."""
    if name in _FILES.names:
        yield from _FILES.load(name).variants(problem, plan)
    if name not in DECISIONS:
        return
    decision = DECISIONS[name]
    if decision.variants is not None:
        yield from decision.variants(problem, plan)
    for value in allowed(problem.constraints, name, decision.tries):
        assert decision.apply is not None
        table = partial(problem.tables.schedule, plan.schedule)
        stages = tuple([decision.apply(stage, value, table) for stage in plan.stages])
        if stages != plan.stages:
            yield changed(problem, plan, stages=stages)


@cache
def changes() -> tuple[str, ...]:
    """Keys of all that is tried, in order."""
    pins = (name for name, found in DECISIONS.items() if found.tries or found.variants)
    return tuple(sorted({*_FILES.names, *pins}))


def finished(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Each variant that was tried, change after change on what is best by then."""
    best = plan
    for name in changes():
        for variant in variants(name, problem, best):
            yield variant
            if _is_better(problem, variant, best):
                best = variant


def hope_s(problem: Problem, plan: Plan) -> float:
    """Returns what a step may come down to, as files of `planner/finishing` say whose changes may
    gain much (`hope_s`); nothing is promised."""
    assert plan.predicted
    files = (_FILES.load(name) for name in _FILES.names)
    found = (float(file.hope_s(problem, plan)) for file in files if hasattr(file, "hope_s"))
    return min([plan.predicted.step_s, *found])


def _is_better(problem: Problem, plan: Plan, than: Plan) -> bool:
    assert plan.predicted and than.predicted
    key = excess_bytes(problem, plan), plan.predicted.step_s
    return key < (excess_bytes(problem, than), than.predicted.step_s)


def changed(problem: Problem, plan: Plan, **changes: Any) -> Plan:
    """The plan with other fields, predicted anew."""
    check_time()
    plan = replace(plan, **changes)
    return settled(problem, plan)
