"""Interleaved 1F1B of Megatron-LM (arXiv:2104.04473): stage s on rank s mod R, several per rank.

Micro-batches go in groups; a group passes all stages of a rank before the next one. Any number of
micro-batches D is legal here (Megatron wants a multiple of R): D // R groups of balanced sizes.
"""

from collections.abc import Iterator
from itertools import accumulate

from meshwright.ir.layout.layout import balanced
from meshwright.ir.plan.schedule import Action, Schedule, Work
from meshwright.planner.problem.schedule_tools import B, F, chunks_of

STAGES_PER_RANK = (2, 3, 4)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Rank r warms up with 2(R-r-1) forwards and one group through all of its stages but one."""
    chunks = chunks_of("interleaved", num_stages, num_ranks)
    sizes = balanced(num_microbatches, max(1, num_microbatches // num_ranks))
    rows = []
    for rank in range(num_ranks):
        forward = tuple(_order(F, sizes, range(rank, num_stages, num_ranks)))
        stages = range(num_stages - num_ranks + rank, -1, -num_ranks)
        backward = tuple(_order(B, sizes, stages))
        warm_up = 2 * (num_ranks - rank - 1) + (chunks - 1) * sizes[0] + 1
        rows.append(_alternate(forward, backward, min(warm_up, len(forward))))
    return Schedule("interleaved", tuple(rows))


def _order(work: Work, sizes: tuple[int, ...], stages: range) -> Iterator[Action]:
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        for stage in stages:
            yield from (Action(stage, work, m) for m in range(end - size, end))


def _alternate(
    forward: tuple[Action, ...], backward: tuple[Action, ...], warm_up: int
) -> tuple[Action, ...]:
    row = list(forward[:warm_up])
    for i, action in enumerate(backward):
        row.append(action)
        row += forward[warm_up + i : warm_up + i + 1]
    return tuple(row)
