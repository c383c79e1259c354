"""DualPipeV (DeepSeek, 2025: DualPipe cut in half): two stages per rank in a V, forwards beside
backwards of other micro-batches.

Rank r of R holds stages r and 2R-1-r. In the middle each forward of one stage has a backward of the
other next to it, so that what one of them sends has the work of the other beside it; weight halves
fill the ramps. That wants a micro-batch for each stage; of fewer, the last ones are left out.
"""

from collections import deque
from collections.abc import Iterator

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import B, F, I, W, chunks_of

STAGES_PER_RANK = (2,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Eight phases, whose lengths are those of DeepSeek's description."""
    chunks_of("dual_pipe_v", num_stages, num_ranks, only=2)
    described = max(num_microbatches, num_stages)
    rows = [
        tuple(a for a in _row(rank, num_ranks, described) if a.microbatch < num_microbatches)
        for rank in range(num_ranks)
    ]
    return Schedule("dual_pipe_v", tuple(rows))


def _row(rank: int, ranks: int, count: int) -> Iterator[Action]:
    early, late = rank, 2 * ranks - 1 - rank
    after, own = ranks - rank - 1, rank + 1
    done = {(stage, work): 0 for stage in (early, late) for work in (F, B)}
    put_off = deque[Action]()

    def forward(stage: int) -> Action:
        done[stage, F] += 1
        return Action(stage, F, done[stage, F] - 1)

    def backward(stage: int, *, halved: bool = False) -> Action:
        microbatch, done[stage, B] = done[stage, B], done[stage, B] + 1
        if halved:
            put_off.append(Action(stage, W, microbatch))
        return Action(stage, I if halved else B, microbatch)

    for _ in range(2 * after):
        yield forward(early)
    for _ in range(own):
        yield from (forward(early), forward(late))
    for _ in range(after):
        yield from (backward(late, halved=True), put_off.popleft(), forward(late))
    for _ in range(count - 2 * ranks + own):
        yield from (forward(early), backward(late), forward(late), backward(early))
    for _ in range(after):
        yield from (backward(late), forward(late), backward(early))
    for i in range(2 * own):
        yield backward(early if i % 2 else late, halved=i >= own)
    for _ in range(after):
        yield from (put_off.popleft(), backward(early, halved=True))
    yield from put_off
