"""What a pair of actions takes: a forward and a backward in turns, each at work while the other
waits for a collective.

It follows `runtime.step.executor.take_turns`, with the phases of `overlap`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.costmodel.block.overlap import (
    Hidden,
    PhaseTimes,
    Turn,
    half_steps,
    in_halves,
    in_turn,
    moves_of,
    phases_of,
    slowing,
)
from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.stage.program import IDLE, Overlap, play, run


class Cut(NamedTuple):
    """A block that is cut where it waits for collectives, on all its samples."""

    alone: Hidden
    """What is hidden of it where nothing of another micro-batch is beside it."""
    phases: PhaseTimes
    slow: Overlap


class CoursePart(NamedTuple):
    """A block of an action."""

    cut: Cut | None
    """None: nobody works beside it."""
    seconds: float
    """What it takes then."""
    again_s: float = 0.0
    """In a backward: of a forward that is made again as it was, before it."""
    again: bool = False
    """That is made again in turns, too."""


Course = tuple[CoursePart, ...]
"""The blocks of an action, in the order in which they run."""


def cut_of(walk: Walk) -> Cut:
    """The block of a walk, cut."""
    return Cut(in_halves(walk, [walk]), phases_of(walk), slowing(walk, *moves_of(walk)))


def hidden_s(forward: Course, backward: Course) -> float:
    """Of their collectives, what a forward and a backward hide together and not by themselves."""
    slow = _slower([part.cut.slow for part in (*forward, *backward) if part.cut])
    lines = [*_turns(forward, back=False)], [*_turns(backward, back=True, first=10**6)]
    alone_s = sum([play([s for turn in line for s in turn], IDLE, slow)[0] for line in lines])
    together = [step for turn in in_turn(lines) for step in turn]
    return max(0.0, alone_s - play(together, IDLE, slow)[0])


def between(course: Course, *, back: bool) -> float:
    """Share of what an action sends that goes between nodes."""
    sent = [
        (sum(cut.phases.sent_back), cut.phases.between_back) if back
        else (sum(cut.phases.sent), cut.phases.between)
        for cut in (part.cut for part in course) if cut
    ]  # fmt: skip
    whole_s = sum(seconds for seconds, _ in sent)
    return sum(seconds * share for seconds, share in sent) / whole_s if whole_s else 0.0


def _turns(course: Course, *, back: bool, first: int = 0) -> Iterator[Turn]:
    """Each goes as far as the next collective; `first`: the number of the first one."""
    steps: Turn = []
    job = first
    for part in course:
        steps.append(run(part.again_s, ""))
        if part.cut is None:
            steps.append(run(part.seconds, ""))
            continue
        for backwards in ([False] if part.again else []) + [back]:
            *turns, rest = half_steps(part.cut.phases, job, backwards)
            job += 1000
            for turn in turns:
                yield [*steps, *turn]
                steps = []
            steps = [*steps, *rest]
    yield steps


def _slower(several: Sequence[Overlap]) -> Overlap:
    return Overlap(
        max([slow.compute for slow in several], default=1.0),
        max([slow.channel for slow in several], default=1.0),
    )
