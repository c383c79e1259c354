"""A schedule for more micro-batches, by repeating part of one for few.

If a part of every rank's row has one forward and one backward of each of its stages, and the parts
begin at a consistent cut (no rank has begun what it needs of a neighbour that comes after the cut),
then the parts may follow each other any number of times: every repetition finds what the first did,
one micro-batch later, and ranks hold as much as before.
"""

from collections.abc import Iterator, Sequence

from meshwright.costmodel.simulate.compiled_schedule import B, F, I, W
from meshwright.costmodel.simulate.simulate import simulate
from meshwright.planner.synthesis.task import Row, Task, to_schedule

Counts = dict[tuple[int, int], int]
"""(stage, F, I or W) -> how many are over."""
Part = tuple[float, int, int, Counts]
"""When it begins, its position and length, and what is over before it."""


def extended(task: Task, rows: Sequence[Row], more: int) -> Iterator[list[Row]]:
    """Ways to make `more` additional micro-batches of rows for the task, from early parts on."""
    timeline = simulate(to_schedule("few", rows), task.stages, offsets=task.release)
    parts = [
        list(_parts(task, rank, row, [timeline.ran.starts[position] for position in positions]))
        for rank, (row, positions) in enumerate(zip(rows, timeline.table.rows, strict=True))
    ]
    seen: set[tuple[int, ...]] = set()
    for time in sorted({part[0] for found in parts for part in found}):
        cut = _cut(task, parts, time)
        if cut is None or tuple(at for at, _ in cut) in seen:
            continue
        seen.add(tuple(at for at, _ in cut))
        yield [
            row[: at + length] + row[at : at + length] * more + row[at + length :]
            for row, (at, length) in zip(rows, cut, strict=True)
        ]


def _parts(task: Task, rank: int, row: Row, begins_s: Sequence[float]) -> Iterator[Part]:
    for at, begin_s in enumerate(begins_s):
        found = _part(task, rank, row, at)
        if found:
            yield begin_s, at, *found


def _part(task: Task, rank: int, row: Row, begin: int) -> tuple[int, Counts] | None:
    """(actions, what is over before it) of the part that begins there, if there is one."""
    wanted = {(s, kind): 1 for s in task.held[rank] for kind in (F, I, W)}
    done: Counts = {}
    for at in range(begin, len(row)):
        for half in _halves(*row[at]):
            done[half] = done.get(half, 0) + 1
            if done[half] > 1:
                return None
        if done == wanted:
            return at + 1 - begin, _counted(row[:begin], wanted)
    return None


def _halves(stage: int, kind: int) -> tuple[tuple[int, int], ...]:
    return ((stage, I), (stage, W)) if kind == B else ((stage, kind),)


def _counted(row: Row, of: Counts) -> Counts:
    found = dict.fromkeys(of, 0)
    for action in row:
        for half in _halves(*action):
            found[half] += 1
    return found


def _cut(task: Task, parts: Sequence[Sequence[Part]], time: float) -> list[tuple[int, int]] | None:
    """(position, actions) for each rank, near a time and consistent with the ranks before."""
    found: list[tuple[int, int]] = []
    over: Counts = {}
    for own in parts:
        for _, at, length, counts in sorted(own, key=lambda part: abs(part[0] - time)):
            together = over | counts
            if _consistent(task, together):
                found.append((at, length))
                over = together
                break
        else:
            return None
    return found


def _consistent(task: Task, over: Counts) -> bool:
    """No stage is ahead of the one that it gets its input, or its gradient, from."""
    for stage in range(1, len(task.stages)):
        if (stage, F) in over and (stage - 1, F) in over:
            if over[stage, F] > over[stage - 1, F] or over[stage, I] < over[stage - 1, I]:
                return False
    return True
