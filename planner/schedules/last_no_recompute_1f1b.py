"""1F1B of Merak (arXiv:2206.04959): early recompute, and none in the last stage.

The last stage holds one micro-batch at a time, whose backward follows at once. Saves F+R more than
early recompute alone.
"""

from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.problem.schedule_tools import chunks_of, recomputing_early

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """The order of 1F1B, with R before each B; the last stage keeps all."""
    chunks_of("last_no_recompute_1f1b", num_stages, num_ranks, only=1)
    last = (num_stages - 1,)
    return recomputing_early("last_no_recompute_1f1b", num_stages, num_microbatches, last)
