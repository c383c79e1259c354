"""Takes what a searcher offers: counts it, checks it, keeps the best legal plan."""

from collections.abc import Iterator

from meshwright.forms.retention import check as check_retention
from meshwright.ir.deadline import TimeUp, check_time, until
from meshwright.ir.plan.beside import waits_for_collectives
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Improvement
from meshwright.ir.plan.verify import check
from meshwright.planner.pins.constraints import broken
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.found import SearchLog
from meshwright.planner.search.objectives import rating
from meshwright.planner.search.offers import Offer
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.progress import ProgressLine


def run(
    problem: Problem,
    offers: Iterator[Offer],
    deadline: float = float("inf"),
    shown: ProgressLine | None = None,
) -> SearchLog:
    """Takes offers until they end, the deadline passes or Ctrl-C; keeps the best legal plan."""
    found = SearchLog()
    try:
        with until(deadline):
            for offer in offers:
                take(problem, offer, found)
                if shown:
                    shown.update(found.candidates, found.best, found.bound_s)
                check_time()
            found.exhausted = _is_covered(found)
    except TimeUp:
        return found
    except KeyboardInterrupt:
        if found.best is None:
            raise
    return found


def take(problem: Problem, offer: Offer, found: SearchLog) -> None:
    found.candidates += offer.candidates
    found.infeasible += offer.infeasible
    for reason, number in offer.pruned.items():
        found.pruned[reason] = found.pruned.get(reason, 0) + number
    found.open_s = found.open_s if offer.open_s is None else offer.open_s
    found.bound_s = found.bound_s if offer.bound_s is None else offer.bound_s
    plan = offer.plan
    if plan is None:
        return
    if broken(problem.constraints, plan, problem.graph):
        found.infeasible += 1
        return
    excess = excess_bytes(problem, plan)
    value = _value(problem, plan)
    found.note(value, excess, plan)
    if excess:
        found.infeasible += 1
        if found.least_excess is None or excess < found.least_excess[0]:
            found.least_excess = (excess, plan)
        return
    assert plan.predicted
    found.least_s = min(found.least_s, plan.predicted.step_s)
    if waits_for_collectives(plan):
        found.waiting_s = min(found.waiting_s, plan.predicted.step_s)
    found.keep(value, plan)
    if found.best is None or value < found.value:
        check(plan, problem.graph, problem.cluster)
        check_retention(plan)
        found.best, found.value = plan, value
        found.improved.append(_improvement(plan, found))


def _value(problem: Problem, plan: Plan) -> tuple[float, ...]:
    return (*rating(problem.objective, problem.cluster, plan), float(len(plan.stages)))


def _is_covered(found: SearchLog) -> bool:
    """Whether a search that has ended left nothing that could be better."""
    if found.open_s is None or found.best is None:
        return found.open_s in (None, float("inf"))
    assert found.best.predicted
    return found.open_s >= found.best.predicted.step_s


def _improvement(plan: Plan, found: SearchLog) -> Improvement:
    assert plan.predicted
    return Improvement(
        candidates=found.candidates, name=name_of(plan), step_s=plan.predicted.step_s,
        bound_s=None if found.bound_s is None else float(f"{found.bound_s:.6g}"),
    )  # fmt: skip
