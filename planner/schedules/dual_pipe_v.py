"""DualPipeV (DeepSeek, 2025: DualPipe cut in half): two stages per rank in a V, forwards beside
backwards of other micro-batches.

Rank r of R holds stages r and 2R-1-r. In the middle each forward of one stage has a backward of the
other next to it, so that what one of them sends has the work of the other beside it; weight halves
fill the ramps. That wants a micro-batch for each stage; of fewer, the last ones are left out.
Each runs by itself here; in `dual_pipe_v_pairs` those that are next to each other run together.
"""

from collections import deque
from collections.abc import Iterator

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import B, F, I, W, chunks_of

STAGES_PER_RANK = (2,)


def schedule(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Eight phases, whose lengths are those of DeepSeek's description."""
    chunks_of("dual_pipe_v", num_stages, num_ranks, only=2)
    rows = [
        tuple(action for unit in dual_row(rank, num_ranks, num_microbatches) for action in unit)
        for rank in range(num_ranks)
    ]
    return Schedule("dual_pipe_v", tuple(rows))


def dual_row(rank: int, ranks: int, count: int) -> Iterator[tuple[Action, ...]]:
    """What a rank does; a forward and the backward beside it come together."""
    for unit in _described(rank, ranks, max(count, 2 * ranks)):
        if own := tuple(action for action in unit if action.microbatch < count):
            yield own


def _described(rank: int, ranks: int, count: int) -> Iterator[tuple[Action, ...]]:
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
        yield (forward(early),)
    for _ in range(own):
        yield (forward(early),)
        yield (forward(late),)
    for _ in range(after):
        yield (backward(late, halved=True),)
        yield (put_off.popleft(),)
        yield (forward(late),)
    for _ in range(count - 2 * ranks + own):
        yield forward(early), backward(late)
        yield forward(late), backward(early)
    for _ in range(after):
        yield (backward(late),)
        yield forward(late), backward(early)
    for i in range(2 * own):
        yield (backward(early if i % 2 else late, halved=i >= own),)
    for _ in range(after):
        yield (put_off.popleft(),)
        yield (backward(early, halved=True),)
    for action in put_off:
        yield (action,)
