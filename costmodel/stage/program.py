"""What an action of a rank does in detail: it computes, and has jobs done by its channel meanwhile.

The channel is what carries the rank's gradients and parameters: jobs one after the other, beside
the computation. `play` takes the time of one action whose rank shares its cores with nobody.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

IDLE = (0.0, 0.0, 0.0)
"""Nothing on the channel."""
ChannelState = tuple[float, float, float]
"""Seconds of work until all jobs are over, the newest scatter, and the scatter before that."""


class Do(IntEnum):
    """A step of a program."""

    RUN = 0
    """Compute."""
    TALK = 1
    """A collective that the rank waits for at once; the channel goes on."""
    START = 2
    """Give the channel a job."""
    WAIT = 3
    """Until a job is over."""
    WAIT_SCATTER = 4
    """Until all scatters but the newest are over."""
    WAIT_ALL = 5


BESIDE = -3
"""The job number of what nobody waits for."""
SCATTER = -1
"""The job number of all scatters, within an action and across actions."""


class Step(NamedTuple):
    """One step; `job` numbers what it starts or waits for within the program."""

    do: Do
    seconds: float = 0.0
    job: int = 0
    what: str = ""
    """Category of time, for people: forward, backward, recompute, tensor, gather, gradients..."""


@dataclass(frozen=True)
class Program:
    """The steps of one action."""

    steps: tuple[Step, ...]

    @cached_property
    def own_s(self) -> float:
        """Seconds of its rank, jobs of the channel left out."""
        return sum([step.seconds for step in self.steps if step.do <= Do.TALK])

    @cached_property
    def own_by_what(self) -> dict[str, float]:
        """`own_s` by category."""
        return self._by_what(Do.RUN, Do.TALK)

    @cached_property
    def jobs_by_what(self) -> dict[str, float]:
        """Seconds of the jobs that it starts, by category."""
        return self._by_what(Do.START)

    def _by_what(self, *kinds: Do) -> dict[str, float]:
        found: defaultdict[str, float] = defaultdict(float)
        for do, seconds, _, what in self.steps:
            if do in kinds:
                found[what] += seconds
        return dict(found)

    @cached_property
    def uses_channel(self) -> bool:
        return any([step.do >= Do.START for step in self.steps])


def run(seconds: float, what: str) -> Step:
    return Step(Do.RUN, seconds, 0, what)


def talk(seconds: float, what: str) -> Step:
    return Step(Do.TALK, seconds, 0, what)


@dataclass(frozen=True, slots=True)
class Overlap:
    """By how much the two slow each other down while both are at work."""

    compute: float = 1.0
    channel: float = 1.0

    @classmethod
    def worst(cls, slowdowns: Iterable[tuple[float, float]]) -> "Overlap":
        """Of several links (`Link.slowdowns`)."""
        compute, channel = zip((1.0, 1.0), *slowdowns, strict=True)
        return cls(max(compute), max(channel))


NO_SLOWDOWN = Overlap()


def play(
    steps: Sequence[Step], state: ChannelState = IDLE, overlap: Overlap = NO_SLOWDOWN
) -> tuple[float, ChannelState]:
    """(seconds, what is left for the channel) of an action that finds the channel in `state`."""
    total, newest, previous = state
    done = now = 0.0
    marks: dict[int, float] = {}
    for do, seconds, job, _ in steps:
        if do <= Do.TALK and done >= total:  # the channel is idle
            now += seconds
        elif do == Do.RUN:
            # Until either is over, each slows the other down.
            until, needed = (total - done) * overlap.channel, seconds * overlap.compute
            if until < needed:
                now += until + seconds - until / overlap.compute
                done = total
            else:
                now += needed
                done += needed / overlap.channel
        elif do == Do.TALK:
            now += seconds
            done = done + seconds if done + seconds < total else total
        elif do == Do.START:
            total += seconds
            marks[job] = total
            if job == SCATTER:
                previous, newest = newest, total
        else:
            mark = total
            if do == Do.WAIT:
                mark = marks[job] if job in marks else 0.0
            elif do == Do.WAIT_SCATTER:
                mark = previous
            if mark > done:
                now += mark - done
                done = mark
    return now, (total - done, max(newest - done, 0.0), max(previous - done, 0.0))


def aged(state: ChannelState, seconds: float) -> ChannelState:
    """The state after the rank has done nothing for a while."""
    total, newest, previous = state
    if seconds <= 0.0:
        return state
    return max(total - seconds, 0.0), max(newest - seconds, 0.0), max(previous - seconds, 0.0)
