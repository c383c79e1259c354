"""A schedule cut to the micro-batches that tell all there is to see."""

from dataclasses import replace

from meshwright.ir.plan.plan import Plan, ScheduleTable
from meshwright.ir.plan.schedule import FORWARDS, Action, Schedule, Work

_ENDS = {Work.BACKWARD, Work.BACKWARD_WEIGHT}


def shortened(plan: Plan) -> Plan:
    """The plan with fewer micro-batches of the same size.

    As many as it takes for each rank to hold as many at once as it ever does, and one more, since
    the first ones find no gradients to add to.
    """
    schedule = plan.schedule.parse()
    most = _most_held(schedule)
    for count in range(2, plan.num_microbatches):
        first = _first(schedule, count - 1)
        if _most_held(first) == most:
            return _with(plan, _first(schedule, count), count)
    return plan


def _first(schedule: Schedule, count: int) -> Schedule:
    """The schedule without the micro-batches from `count` on."""
    return Schedule(
        schedule.name,
        tuple(tuple(a for a in row if a.microbatch < count) for row in schedule.ranks),
        frozenset([pair for pair in schedule.pairs if all(a.microbatch < count for a in pair)]),
    )


def _most_held(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most forwards whose backward is not over, over all of its stages."""
    return tuple(map(_most_of_row, schedule.ranks))


def _most_of_row(row: tuple[Action, ...]) -> int:
    held = most = 0
    for action in row:
        held += (action.work in FORWARDS) - (action.work in _ENDS)
        most = max(most, held)
    return most


def _with(plan: Plan, schedule: Schedule, count: int) -> Plan:
    return replace(
        plan,
        num_microbatches=count,
        global_batch_size=count * plan.samples_per_microbatch,
        schedule=ScheduleTable(name=schedule.name, rows=schedule.rows),
    )
