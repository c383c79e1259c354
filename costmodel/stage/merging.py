"""Puts steps of one kind together, which makes a step cheaper to play and no different."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from meshwright.costmodel.stage.program import Do, Program, Step

Steps = Callable[[], list[Step]]


class Programs(Mapping[int, Program]):
    """Each is worked out when it is first asked for: most schedules have few kinds of actions."""

    def __init__(self, steps: Mapping[int, Steps]) -> None:
        self._steps = steps
        self._made: dict[int, Program] = {}

    def __getitem__(self, kind: int) -> Program:
        if kind not in self._made:
            self._made[kind] = Program(merged(self._steps[kind]()))
        return self._made[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._steps

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same with steps of one kind put together, and empty ones left out.

    Beside a channel only neighbours are; without one the order makes no difference.
    """
    if any([step.do > Do.TALK for step in steps]):
        whole = [step for step in steps if step.seconds or step.do > Do.TALK]
        joints = [1 for a, b in pairwise(whole) if a.do == b.do <= Do.TALK and a.what == b.what]
        return tuple(with_neighbours(whole) if joints else whole)
    totals: dict[tuple[Do, str], float] = {}
    for do, seconds, _, what in steps:
        if seconds:
            key = do, what
            totals[key] = totals[key] + seconds if key in totals else seconds
    return tuple([Step(do, seconds, 0, what) for (do, what), seconds in totals.items()])


def with_neighbours(steps: Sequence[Step]) -> list[Step]:
    """With neighbours of one kind put together."""
    found: list[Step] = []
    last: tuple[Do, str] | None = None
    for step in steps:
        do, seconds, _, what = step
        if do > Do.TALK:
            found.append(step)
            last = None
        elif seconds and last == (do, what):
            found[-1] = Step(do, found[-1].seconds + seconds, 0, what)
        elif seconds:
            found.append(step)
            last = do, what
    return found
