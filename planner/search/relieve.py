"""Stores that take less of a device's memory, where that is short: where nothing fits, the search
again with each; else on what would be faster if it did fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.ir.plan.plan import Plan
from meshwright.planner.decisions.store import relieving_pins
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.found import SearchLog

MOST = 8
"""Plans that do not fit and are tried with each store."""


def relieved(
    problem: Problem,
    solve: Callable[[Problem], Plan | None],
    first: Callable[[Problem], Plan | None],
    least_s: float,
) -> Iterator[Plan]:
    """Yields the best plan of each such store that `solve` finds one for, where the plan that
    `first` finds with it takes less than `least_s`; none where a store is pinned, or the memory of
    devices is that of their hosts."""
    apart = any(device.is_apart for device in problem.tables.devices.values())
    for pin in relieving_pins(problem.constraints) if apart else ():
        asked = replace(problem, constraints=(*problem.constraints, pin))
        tried = first(asked) if least_s < float("inf") else None
        if least_s < float("inf") and not (
            tried and tried.predicted and tried.predicted.step_s < least_s
        ):
            continue
        for found in (solve(asked), tried):
            if found is not None:
                yield replace(found, constraints=tuple(map(str, problem.constraints)))


def is_short(found: SearchLog) -> bool:
    """Whether a search left something out for want of memory."""
    return found.best is None or bool(found.infeasible or found.pruned.get("memory"))


def short_of(found: SearchLog) -> list[Plan]:
    """Returns the best of each kind that would be better than what fits, the best first."""
    entries = [e for e in found.kinds.values() if e[1] and e[0] < found.value]
    return [plan for _, _, plan in sorted(entries, key=lambda entry: entry[0])][:MOST]
