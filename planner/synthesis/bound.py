"""A step time that no schedule of a task can beat: work, the way in and out, and memory.

A rank does all its work after its first forward can have come and before what must follow its last
backward. And where at most k micro-batches fit, every k-th waits until one has gone all the way to
the last stage and back; and bytes are held for at least so long.
"""

from math import ceil

from meshwright.costmodel.simulate.compiled_schedule import B, F, I, W
from meshwright.ir.errors import Infeasible
from meshwright.ir.text.units import size
from meshwright.planner.synthesis.task import Task


def way_s(task: Task) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """When the forward and the backward of a lone micro-batch can start at each stage."""
    now, num_stages = 0.0, len(task.stages)
    forward, backward = [0.0] * num_stages, [0.0] * num_stages
    for stage in range(num_stages):
        forward[stage] = now = max(now, task.release[task.placement[stage]])
        now += task.least_s[stage][F] + task.sends_s[stage]
    for stage in range(num_stages - 1, -1, -1):
        backward[stage] = now
        now += halves_s(task, stage)[0] + (task.sends_s[stage - 1] if stage else 0.0)
    return tuple(forward), tuple(backward)


def halves_s(task: Task, stage: int) -> tuple[float, float]:
    """Seconds of the input half and of the rest, at least, whether in one or in two."""
    least = task.least_s[stage]
    first = min(least[B], least[I])
    return first, max(0.0, min(least[B], least[I] + least[W]) - first)


def bound_s(task: Task) -> float:
    """Infeasible if a rank cannot hold one micro-batch."""
    forward, backward = way_s(task)
    end = backward[0] + halves_s(task, 0)[0]
    last = halves_s(task, 0)[1]
    best = end + last
    for rank, own in enumerate(task.held):
        halves = [halves_s(task, s) for s in own]
        moves = sum(task.least_s[s][F] + h[0] for s, h in zip(own, halves, strict=True))
        begin = min(forward[s] for s in own)
        # What follows the last backward of the rank: the way to stage 0, and its weight half.
        tail = min(end - backward[s] - h[0] for s, h in zip(own, halves, strict=True))
        count = task.num_microbatches
        best = max(best, begin + count * (moves + sum(h[1] for h in halves)))
        best = max(best, begin + count * moves + tail + last)
        for stage in own:
            best = max(best, _memory_s(task, rank, stage, forward[stage]))
        best = max(best, begin + _filled_s(task, rank))
    return best


def _memory_s(task: Task, rank: int, stage: int, forward: float) -> float:
    """Rounds of as many micro-batches as fit, one after the other, from `forward` on."""
    beside = sum(task.stages[s].saved_bytes for s in task.held[rank] if s != stage)
    saved, room = task.stages[stage].saved_bytes, task.capacity[rank]
    if saved + beside > room:
        raise Infeasible(
            f"pipeline rank {rank} may hold {size(int(room))} of activations, and one micro-batch "
            f"needs {size(saved + beside)}: use more micro-batches, more stages or recompute"
        )
    if not saved or room >= saved * task.num_microbatches:
        return 0.0
    rounds = ceil(task.num_microbatches / int(room // saved))
    return forward + rounds * _held_s(task, stage)


def _filled_s(task: Task, rank: int) -> float:
    """Bytes times the seconds that they are held, through what the rank may hold."""
    held = sum(task.stages[s].saved_bytes * _held_s(task, s) for s in task.held[rank])
    return task.num_microbatches * held / task.capacity[rank] if held else 0.0


def _held_s(task: Task, stage: int) -> float:
    """From the forward of a micro-batch to the end of its backward, if nothing waits."""
    later = range(stage + 1, len(task.stages))
    found = task.least_s[stage][F] + sum(halves_s(task, stage))
    found += sum(task.least_s[s][F] + halves_s(task, s)[0] for s in later)
    return found + 2 * sum(task.sends_s[stage:])
