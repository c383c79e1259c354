"""A step time that no plan of the searched space can beat, by the same cost model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from meshwright.forms.sync import is_searched
from meshwright.ir.memo import Memo
from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.bounds.beside import LeastCosts
from meshwright.planner.bounds.frames import Frame, frames
from meshwright.planner.bounds.relaxation import Relaxation
from meshwright.planner.pins.constraints import Constraint, allowed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import SCHEDULES, traits

_last: Memo[tuple[Constraint, ...], Relaxation] = Memo()
_ROUNDING = 1e-9
"""By which sums in another order may differ, at the most."""
_NEAR = 0.002
"""So much of a bound is given away where that spares a relaxation."""


def relaxed(problem: Problem) -> Relaxation:
    """The relaxation to plans that wait for their collectives; the last one of a problem is kept
    until `forget`."""
    known = _last.of(problem)
    if problem.constraints not in known:
        known.clear()
        runs = LeastCosts(problem) if _asks_for_pairs(problem) else RunCosts(problem)
        known[problem.constraints] = _relaxation(runs)
    return known[problem.constraints]


def _asks_for_pairs(problem: Problem) -> bool:
    """Whether actions of all plans run together: then nothing is waited for for certain."""
    names = allowed(problem.constraints, "schedule", SCHEDULES)
    return bool(names) and all(traits(name).pairs for name in names)


def forget(problem: Problem) -> None:
    """Lets go of what a search needs and nobody after it."""
    _last.of(problem).clear()


def _relaxation(runs: RunCosts) -> Relaxation:
    return Relaxation(runs, [Places(runs.problem, order) for order in orders(runs.problem)])


def lower_bound(problem: Problem, *, waits: bool = True, late: bool = False) -> float:
    """Seconds per step: the least of all numbers of pipeline ranks and micro-batches.

    With `waits`, of plans whose blocks wait for their collectives and run as they are; else of
    all: whatever overlap hides, torch.compile and kernels save. With `late`, or of all, also of
    those whose replicas agree by other forms than ZeRO's.
    """
    relaxation = relaxed(problem)
    if not waits:
        least = LeastCosts(problem)
        equal = problem.tables.profile is None  # a profile knows compiled blocks by other bytes
        relaxation = relaxation.under(least) if equal else _relaxation(least)
    every, found = frames(problem), 0.0
    for least_s, _ in _ascending(every, relaxation.quick_s, lambda f: relaxation.bound(f).seconds):
        found = least_s
        break
    if late or not waits:
        for form in filter(is_searched, allowed(problem.constraints, "sync", problem.forms)):
            found = _with_form(relaxation, every, form, found)
    return found if found < float("inf") else 0.0


def _with_form(relaxation: Relaxation, every: Sequence[Frame], form: str, found: float) -> float:
    """The least of `found` and the bounds of frames whose replicas agree by a form."""
    quick = partial(relaxation.quick_s, sync=form)
    for least_s, frame in _ascending(every, quick, partial(relaxation.floor_s, sync=form)):
        if least_s >= found * (1 - _NEAR):
            return min(found, least_s)
        found = min(found, relaxation.bound(frame, form).seconds)
    return found


def _ascending(
    frames: Sequence[Frame], quick: Callable[[Frame], float], exact: Callable[[Frame], float]
) -> Iterator[tuple[float, Frame]]:
    """Frames by their exact values, which are asked for as far as they are needed: they are not
    below the quick ones."""
    left = [(quick(frame) * (1 - _ROUNDING), False, frame) for frame in frames]
    heapify(left)
    while left:
        value, known, frame = heappop(left)
        if known:
            yield value, frame
        else:
            heappush(left, (exact(frame), True, frame))
