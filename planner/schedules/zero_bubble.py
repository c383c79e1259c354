"""ZB-H1 (Zero Bubble Pipeline Parallelism, arXiv:2401.10241): 1F1B with the weight half put off.

Stage i puts off the weight gradients of i micro-batches, so that its memory stays at the S
micro-batches which the first stage of 1F1B holds, and the bubble is a third of that of 1F1B.
"""

from collections.abc import Iterator

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import F, I, W, chunks_of

STAGES_PER_RANK = (1,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Forward and input half in the order of 1F1B; weight halves follow at a distance of i."""
    chunks_of("zero_bubble", num_stages, num_ranks, only=1)
    rows = (tuple(_row(s, num_stages, num_microbatches)) for s in range(num_stages))
    return Schedule("zero_bubble", tuple(rows))


def _row(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    warm_up = min(num_stages - stage, num_microbatches)
    yield from (Action(stage, F, m) for m in range(warm_up))
    for done in range(num_microbatches):
        yield Action(stage, I, done)
        if done >= stage:
            yield Action(stage, W, done - stage)
        if warm_up + done < num_microbatches:
            yield Action(stage, F, warm_up + done)
    yield from (
        Action(stage, W, m) for m in range(max(0, num_microbatches - stage), num_microbatches)
    )
