"""The largest global batch that fits, by doubling and bisection over batch sizes that are legal."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash

MOST = 2**20
"""Samples; larger batches are not looked at."""


def largest_batch(
    plan_at: Callable[[int], Plan | None], start: int, unit: int, in_time: Callable[[], bool]
) -> Plan | None:
    """The plan at the largest multiple of `unit` for which there is one, looking from `start`.

    What fits at a batch is taken to fit at smaller ones. When time is up, the best so far.
    """
    low, high, best = _bracket(plan_at, max(1, start // unit), unit, in_time)
    if best is None:
        return None
    while high - low > 1 and in_time():
        middle = (low + high) // 2
        plan = plan_at(middle * unit)
        if plan is None:
            high = middle
        else:
            low, best = middle, plan
    return rehash(replace(best, notes=(*best.notes, _note(low, high, unit))))


def _bracket(
    plan_at: Callable[[int], Plan | None], start: int, unit: int, in_time: Callable[[], bool]
) -> tuple[int, int, Plan | None]:
    """A number of units that fits, a larger one that does not, and the plan of the first."""
    best = plan_at(start * unit)
    low = start
    if best is None:
        while best is None and low > 1 and in_time():
            high, low = low, max(1, low // 2)
            best = plan_at(low * unit)
        return low, high if best else low + 1, best
    while low * unit < MOST and in_time():
        plan = plan_at(2 * low * unit)
        if plan is None:
            return low, 2 * low, best
        low, best = 2 * low, plan
    return low, low + 1, best


def _note(low: int, high: int, unit: int) -> str:
    if high - low > 1:
        return (
            f"largest batch: time was up; {high * unit} does not fit, those between were not tried"
        )
    if low * unit >= MOST:
        return f"largest batch: batches above {low * unit} were not tried"
    return f"largest batch: {high * unit} does not fit"
