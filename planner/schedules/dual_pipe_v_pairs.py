"""DualPipeV whose forwards and backwards beside each other run together, in turns: what one of them
sends to experts and along model axes has the work of the other beside it.

Backwards are whole: what takes turns is not cut in halves, too.
"""

from collections.abc import Iterator

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import B, I, W, chunks_of
from meshwright.planner.schedules.dual_pipe_v import dual_row

STAGES_PER_RANK = (2,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """DualPipeV's rows; two actions that stand together there are a pair."""
    chunks_of("dual_pipe_v_pairs", num_stages, num_ranks, only=2)
    rows = [tuple(_whole(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)]
    pairs = frozenset((unit[0], unit[1]) for row in rows for unit in row if len(unit) > 1)
    ranks = tuple(tuple(action for unit in row for action in unit) for row in rows)
    return Schedule("dual_pipe_v_pairs", ranks, pairs)


def _whole(rank: int, ranks: int, count: int) -> Iterator[tuple[Action, ...]]:
    """A rank's row with whole backwards."""
    for unit in dual_row(rank, ranks, count):
        if unit[0].work is not W:
            yield tuple(Action(a.stage, B, a.microbatch) if a.work is I else a for a in unit)
