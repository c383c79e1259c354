"""ZB-V (Controllable Memory, arXiv:2405.15362): two stages per rank, placed in a V.

Rank r holds stages r and 2R-1-r, so the loss is where the input is, and no rank holds more than R
micro-batches. The order is list scheduling with equal times for F, I and W.
"""

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import I, W, chunks_of, greedy

STAGES_PER_RANK = (2,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Input halves first, then forwards of the later stage, weight halves where nothing else is."""
    chunks_of("zbv", num_stages, num_ranks, only=2)
    placement = tuple(min(s, num_stages - 1 - s) for s in range(num_stages))
    return greedy("zbv", num_microbatches, placement, num_ranks, _key)


def _key(action: Action) -> tuple[int, ...]:
    urgency = {I: 0, W: 2}.get(action.work, 1)
    return urgency, -action.stage, action.microbatch
