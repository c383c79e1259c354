"""DAPPLE's early backward, warm-up policy PB (arXiv:2007.01045, section 4): K_i = min(2(S-i)-1, D).

Nearly twice the micro-batches in flight of PA: hides communication between stages that is of the
same order as their computation, for more memory.
"""

from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.problem.schedule_tools import chunks_of, early_backward

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """K_i micro-batches before the first backward of stage i."""
    chunks_of("dapple_pb", num_stages, num_ranks, only=1)
    warm_ups = tuple(min(2 * (num_stages - s) - 1, num_microbatches) for s in range(num_stages))
    return early_backward("dapple_pb", num_microbatches, warm_ups)
