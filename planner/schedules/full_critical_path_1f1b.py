"""Merak's shifted critical path (arXiv:2206.04959): the stage before the last begins with F F F B.

Its first backward and third forward change places, and it keeps its first micro-batch: neither that
forward nor a recompute then lies on the path from the first forward to the last backward.
"""

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import B, F, K, R, chunks_of, recomputing_early

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Early recompute, none in the last stage, and the shift where there are micro-batches for it.

    It costs the stage before the last one more micro-batch in flight.
    """
    name = "full_critical_path_1f1b"
    chunks_of(name, num_stages, num_ranks, only=1)
    plain = recomputing_early(name, num_stages, num_microbatches, (num_stages - 1,))
    if num_stages < 2 or num_microbatches < 3:
        return plain
    rows = list(plain.ranks)
    rows[-2] = _shifted(rows[-2])
    return Schedule(name, tuple(rows))


def _shifted(row: tuple[Action, ...]) -> tuple[Action, ...]:
    stage = row[0].stage
    first, kept = Action(stage, F, 0), Action(stage, K, 0)
    moved = {Action(stage, R, 0), Action(stage, B, 0)}
    rest = [action for action in row if action not in moved and action != first]
    at = rest.index(Action(stage, F, 2)) + 1
    return (kept, *rest[:at], Action(stage, B, 0), *rest[at:])
