"""A plan with what is known of how good it is: bound, gap, the best of other kinds."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from meshwright.ir.kernels import PLACED
from meshwright.ir.placed import used
from meshwright.ir.plan import Evidence, Plan
from meshwright.ir.plan_io import rehash
from meshwright.ir.schedule import says_when_to_recompute
from meshwright.planner.across.bound import lower_bound
from meshwright.planner.across.run_classes import DEEP
from meshwright.planner.deadline import TimeUp, until
from meshwright.planner.finishing.overlap import overlaps
from meshwright.planner.found import Found
from meshwright.planner.notes import filled
from meshwright.planner.pins.constraints import Pin, allowed, freed
from meshwright.planner.predict import in_detail
from meshwright.planner.problem import Problem
from meshwright.planner.schedule_tools import MADE, SCHEDULES
from meshwright.planner.why import alternative, kind_of

ALTERNATIVES = 6
"""Plans of other kinds that a plan tells of."""


def with_evidence(
    problem: Problem, best: Plan, found: Found, searcher: str, end: float = float("inf")
) -> Plan:
    """The plan with its evidence, versions and hash. A bound that would take longer than to `end`
    is left out."""
    best = replace(best, notes=(*best.notes, *filled(problem, best)))
    assert best.predicted
    try:
        with until(end):
            bound = _bound_s(problem, found)
    except TimeUp:
        bound = 0.0
    others = [entry for entry in found.kinds.values() if kind_of(entry[2]) != kind_of(best)]
    others.sort(key=lambda entry: (entry[1] > 0, *entry[0]))
    evidence = Evidence(
        searcher=searcher,
        seed=problem.seed,
        candidates=found.candidates,
        infeasible=found.infeasible,
        exhausted=found.exhausted,
        pruned={reason: n for reason, n in sorted(found.pruned.items()) if n},
        bound_s=bound,
        gap=float(f"{best.predicted.step_s / bound - 1:.6g}") if bound else 0.0,
        alternatives=tuple(alternative(p, best, extra) for _, extra, p in others[:ALTERNATIVES]),
        improved=tuple(found.improved),
    )
    return rehash(replace(in_detail(problem, best), evidence=evidence, versions=_versions()))


def _bound_s(problem: Problem, found: Found) -> float:
    """What no plan can beat: by the relaxation, or because nothing better is left open."""
    free = with_any_schedule(problem)
    if found.bound_s is None and len(problem.graph.blocks) > DEEP:
        return 0.0
    bound_s = lower_bound(free) if found.bound_s is None else found.bound_s
    if found.best and found.best.schedule.name == MADE:
        return float(f"{bound_s:.6g}")  # what was gone through are the schedules of files
    if found.best and says_when_to_recompute(problem.tables.schedule(found.best.schedule)):
        asked = Pin("schedule", found.best.schedule.name)
        early = replace(free, constraints=freed(free.constraints, "schedule", asked))
        return float(f"{min(bound_s, lower_bound(early)):.6g}")
    beside = found.best and (overlaps(found.best) or used(found.best) & set(PLACED))
    if found.best and found.best.predicted and beside:
        return float(f"{min(bound_s, found.best.predicted.step_s):.6g}")
    if found.open_s is not None and found.open_s > bound_s:
        bound_s = max(bound_s, min(found.open_s, found.least_s))
    return float(f"{bound_s:.6g}")


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
    pipelines = freed(problem.constraints, "schedule", Pin("pp", 2, ">="))
    return replace(problem, constraints=pipelines)
