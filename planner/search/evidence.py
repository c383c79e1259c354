"""A plan with what is known of how good it is: bound, gap, the best of other kinds."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from meshwright.ir.deadline import TimeUp, until
from meshwright.ir.plan.beside import blocks_wait, chooses_sync, waits_for_collectives
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.plan.predicted import Evidence
from meshwright.ir.plan.schedule import says_when_to_recompute
from meshwright.planner.across.run_classes import DEEP
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.pins.constraints import ParametersAs, Pin, allowed, freed
from meshwright.planner.problem.predict import in_detail
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import MADE, SCHEDULES
from meshwright.planner.search.found import SearchLog
from meshwright.planner.search.notes import filled, notes_of
from meshwright.planner.search.plan_comparison import alternative, kind_of

ALTERNATIVES = 6
"""Plans of other kinds that a plan tells of."""
ROUNDING = 2e-6
"""By which a bound and a step of the same seconds may differ: both are kept in six digits."""


def with_evidence(
    problem: Problem, best: Plan, found: SearchLog, searcher: str, end: float = float("inf")
) -> Plan:
    """The plan with notes, its evidence, versions and hash. A bound that would take longer than to
    `end` is left out."""
    notes = (*notes_of(problem, best), *best.notes, *filled(problem, best))
    best = replace(best, notes=notes)
    assert best.predicted
    try:
        with until(end):
            bound = _proven_s(problem, found, best)
    except TimeUp:
        bound = 0.0
    others = [entry for entry in found.kinds.values() if kind_of(entry[2]) != kind_of(best)]
    others.sort(key=lambda entry: (entry[1] > 0, *entry[0]))
    evidence = Evidence(
        searcher=searcher,
        seed=problem.seed,
        candidates=found.candidates,
        infeasible=found.infeasible,
        exhausted=found.exhausted and not _differ(problem) and not _of_modules(problem),
        pruned={reason: n for reason, n in sorted(found.pruned.items()) if n},
        bound_s=bound,
        gap=float(f"{best.predicted.step_s / bound - 1:.6g}") if bound else None,
        alternatives=tuple(alternative(p, best, extra) for _, extra, p in others[:ALTERNATIVES]),
        improved=tuple(found.improved),
    )
    return rehash(replace(in_detail(problem, best), evidence=evidence, versions=_versions()))


def _proven_s(problem: Problem, found: SearchLog, best: Plan) -> float:
    """What no plan can beat, in six digits as steps are; 0 where that is not known.

    A bound that some plan does beat is wrong, and so not claimed.
    """
    assert best.predicted
    bound_s, step_s = _bound_s(problem, found, best), best.predicted.step_s
    if bound_s > step_s * (1 + ROUNDING):
        return 0.0
    return float(f"{min(bound_s, step_s):.6g}")


def _bound_s(problem: Problem, found: SearchLog, best: Plan) -> float:
    """By the relaxation, or because nothing better is left open; 0 where none is known.

    Where the best plan waits for its collectives, of plans that do; where only replicas do not, of
    plans whose blocks do; else of all there are.
    """
    if _differ(problem):
        return 0.0  # bounds are of plans that treat all parameters of a stage alike
    # Searchers take modules that differ in precision alike, and so know no bound.
    waits = waits_for_collectives(best) and not _of_modules(problem)
    of = {"waits": blocks_wait(best), "late": chooses_sync(best)}
    known_s = found.bound_s if waits else None
    if len(problem.graph.blocks) > DEEP and (found.bound_s is None or not blocks_wait(best)):
        return 0.0
    free = with_any_schedule(problem)
    bound_s = lower_bound(free, **of) if known_s is None else known_s
    if best.schedule.name == MADE:
        return bound_s  # what was gone through are the schedules of files
    if says_when_to_recompute(problem.tables.schedule(best.schedule)):
        asked = Pin("schedule", best.schedule.name)
        early = replace(free, constraints=freed(free.constraints, "schedule", asked))
        return min(bound_s, lower_bound(early, **of))
    if waits and found.open_s is not None and found.open_s > bound_s:
        return max(bound_s, min(found.open_s, found.waiting_s))
    return bound_s


def _differ(problem: Problem) -> bool:
    """Whether plans may be other than those that searchers judge: parameters of a stage may differ,
    or training may be changed."""
    apart = any(isinstance(item, ParametersAs) for item in problem.constraints)
    return apart or bool(problem.allow) or problem.rows is not None


def _of_modules(problem: Problem) -> bool:
    """Whether modules differ in precision."""
    return bool(problem.tables.numbers.within)


def _versions() -> dict[str, str]:
    """Of the installed packages that a plan depends on; run from a checkout, ours has none."""
    found = {}
    for name in ("meshwright", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def with_any_schedule(problem: Problem) -> Problem:
    """The problem; where schedules shall be made, that of finding pipelines to make them for."""
    if allowed(problem.constraints, "schedule", SCHEDULES):
        return problem
    needed = Pin("pp", 2, ">=", because="schedules are made for pipelines")
    pipelines = freed(problem.constraints, "schedule", needed)
    return replace(problem, constraints=pipelines)
