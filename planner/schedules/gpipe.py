"""GPipe (arXiv:1811.06965): all forwards, then all backwards."""

from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.problem.schedule_tools import chunks_of, early_backward

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Every stage warms up with all its micro-batches."""
    chunks_of("gpipe", num_stages, num_ranks, only=1)
    return early_backward("gpipe", num_microbatches, (num_microbatches,) * num_stages)
