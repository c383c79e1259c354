"""Stages whose actions the schedule pairs: what they wait for has other work beside it."""

from functools import lru_cache

from meshwright.ir.plan.plan import Plan, ScheduleTable
from meshwright.ir.plan.schedule import PAIRED


def paired_stages(plan: Plan) -> frozenset[int]:
    """Those with an action that runs together with another."""
    return _paired(plan.schedule)


@lru_cache(maxsize=64)
def _paired(table: ScheduleTable) -> frozenset[int]:
    if not any(PAIRED in row for row in table.rows):
        return frozenset()
    return table.parse().paired
