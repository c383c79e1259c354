"""1F1B of Merak (arXiv:2206.04959): a stage recomputes before it waits for the gradient.

Saves (S-1)R of the (M+S-1)(F+R+B) that 1F1B with full recompute takes.
"""

from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.problem.schedule_tools import chunks_of, recomputing_early

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """The order of 1F1B, with R before each B."""
    chunks_of("pre_recompute_1f1b", num_stages, num_ranks, only=1)
    return recomputing_early("pre_recompute_1f1b", num_stages, num_microbatches)
