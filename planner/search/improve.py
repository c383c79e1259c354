"""What is tried beside a searcher and on its best plans: things on the host, schedules made for
pipelines, changes that pay only on good plans."""

import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from meshwright.ir.deadline import TimeUp, busy_for, until
from meshwright.ir.plan.plan import Plan
from meshwright.planner.across.first_plans import first_choices
from meshwright.planner.across.mesh_variants import ways_in_haste
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import BEST, CLOSE, finished, hope_s, variants
from meshwright.planner.search.found import SearchLog, pipelines
from meshwright.planner.search.offers import Offer, find_searcher
from meshwright.planner.search.progress import ProgressLine
from meshwright.planner.search.relieve import is_short, relieved, short_of
from meshwright.planner.search.take import run, take
from meshwright.planner.synthesis.choose import asked_for, possible_s, synthesised

FIRST = 8
"""Plans of equal stages that are looked at with things on the host: whether that may pay."""
TAKEN = 16
"""Plans of equal stages that are looked at where time was up before there was one."""
HASTE_S = 10.0
"""Seconds of this thread's own work for the first plan, when no other time is left."""
PROMISING, PIPELINES = 16, 3
"""Plans, the best of their kind, that are looked at for how much a schedule made for them could
gain, and the most promising of them, for which one is made. On 39 published profiles and
clusters the three first by `_promise` held the best schedule of all, within 1 %."""


def take_first(problem: Problem, found: SearchLog, end: float, shown: ProgressLine) -> None:
    """Where time was up before there was a plan: plans of equal stages, as many as come first or
    more until one fits. The first of them are looked at however late it is: on a busy machine the
    time may be up before anything is priced, and a late plan is better than none."""
    with suppress(TimeUp), until(end):
        for number, choice in enumerate(first_choices(problem), 1):
            take(problem, Offer(plan=build_plan(problem, obey(problem, choice))), found)
            shown.update(found.candidates, found.best, found.bound_s)
            if found.best is not None and number >= TAKEN:
                return
    if found.best is not None or found.candidates >= TAKEN:
        return
    with suppress(TimeUp), busy_for(HASTE_S):
        for choice in islice(first_choices(problem, ways_in_haste(problem)), TAKEN):
            take(problem, Offer(plan=build_plan(problem, obey(problem, choice))), found)
            if found.best is not None:
                return


def relieve(problem: Problem, found: SearchLog, searcher: str, end: float) -> None:
    """Plans that keep things on the host, where memory is short."""

    def solve(asked: Problem) -> Plan | None:
        return run(asked, find_searcher(searcher)(asked), end).best

    def first(asked: Problem) -> Plan | None:
        log = SearchLog()
        for choice in islice(first_choices(asked), FIRST):
            take(asked, Offer(plan=build_plan(asked, obey(asked, choice))), log)
            if log.best is not None:
                break
        return log.best

    if not is_short(found) and problem.objective != "memory":
        return
    try:
        with until(end):
            least_s = float("inf") if problem.objective == "memory" else found.least_s
            for plan in relieved(problem, solve, first, least_s):
                take(problem, Offer(plan=plan), found)
            for choice in islice(first_choices(problem), FIRST if problem.rows else 0):
                base = build_plan(problem, obey(problem, choice))
                for plan in variants("cached_tables", problem, base):
                    take(problem, Offer(plan=plan), found)
                if found.best is not None:
                    break
    except TimeUp:
        return


def improve(problem: Problem, found: SearchLog, deadline: float) -> None:
    """What is tried on the best plans of a searcher."""
    try:
        with until(deadline):
            for plan in short_of(found):
                for name in ("host_memory", "cached_tables"):
                    for variant in variants(name, problem, plan):
                        take(problem, Offer(plan=variant), found)
            _make_schedules(problem, found, deadline)
            _finish_best(problem, found, deadline)
    except TimeUp:
        return


def all_made(problem: Problem, found: SearchLog, deadline: float) -> SearchLog:
    """The best pipelines with schedules made for them, and nothing else."""
    made = replace(found, best=None, value=(), exhausted=False, least_excess=None)
    made.kinds, made.pipelines, made.lean, made.near, made.improved = {}, {}, {}, {}, []
    made.least_s = made.waiting_s = float("inf")
    made.open_s = None
    for plan in pipelines(found)[:PIPELINES]:
        if made.best is None or time.monotonic() < deadline:
            new = asked_for(problem, plan)
            if new:
                take(problem, Offer(plan=new), made)
    return made


def _make_schedules(problem: Problem, found: SearchLog, deadline: float) -> None:
    """Schedules made for the best pipelines, and for what fits under no schedule of a file."""
    if problem.objective == "memory":
        return
    ranked = [(_promise(problem, p), n) for n, p in enumerate(pipelines(found)[:PROMISING])]
    plans = [pipelines(found)[n] for _, n in sorted(ranked)[:PIPELINES]]
    for plan in plans:
        if time.monotonic() < deadline:
            made = synthesised(problem, plan, below_s=found.least_s)
            if made:
                take(problem, Offer(plan=made), found)


def _finish_best(problem: Problem, found: SearchLog, deadline: float) -> None:
    """The best plan of each kind with what is tried on good plans only, those after them of which
    that may make the best."""
    if problem.objective == "memory":
        return
    ranked = sorted(found.kinds.values(), key=lambda entry: (entry[1], entry[0]))
    hopes = {id(plan): hope_s(problem, plan) for _, _, plan in ranked}
    hopeful = [
        e for e in ranked[BEST:] if e[2].predicted and hopes[id(e[2])] < e[2].predicted.step_s
    ]
    hopeful.sort(key=lambda entry: (entry[1], hopes[id(entry[2])]))
    for _, excess, plan in (*ranked[:BEST], *hopeful[:BEST]):
        if not excess and hopes[id(plan)] > CLOSE * found.least_s:
            continue
        for variant in finished(problem, plan):
            take(problem, Offer(plan=variant), found)
            if time.monotonic() > deadline:
                return


def _promise(problem: Problem, plan: Plan) -> float:
    """By which pipelines are compared: what one takes now and what it might come down to count
    alike. By the latter alone slow ones go first, of which next to nothing is known."""
    assert plan.predicted
    return plan.predicted.step_s * possible_s(problem, plan)
