"""DAPPLE's early backward, warm-up policy PA (arXiv:2007.01045, section 4): K_i = min(S - i, D).

In order and memory this is 1F1B; DAPPLE uses it where communication is cheap.
"""

from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.problem.schedule_tools import chunks_of, early_backward

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """K_i micro-batches before the first backward of stage i."""
    chunks_of("dapple_pa", num_stages, num_ranks, only=1)
    warm_ups = tuple(min(num_stages - s, num_microbatches) for s in range(num_stages))
    return early_backward("dapple_pa", num_microbatches, warm_ups)
