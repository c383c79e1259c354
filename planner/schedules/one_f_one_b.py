"""1F1B as in PipeDream-Flush (arXiv:2006.09503), Megatron-LM and Merak."""

from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.problem.schedule_tools import chunks_of, early_backward

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """A stage holds at most as many micro-batches as stages follow it, itself included."""
    chunks_of("one_f_one_b", num_stages, num_ranks, only=1)
    warm_ups = tuple(min(num_stages - s, num_microbatches) for s in range(num_stages))
    return early_backward("one_f_one_b", num_microbatches, warm_ups)
