"""What a pipeline rank is at in a simulation by events."""

from collections import deque
from collections.abc import Generator
from typing import NamedTuple

from meshwright.costmodel.stage.program import IDLE, NO_SLOWDOWN

Process = Generator[None, None, None]
"""Runs until it must wait, and is resumed by the event that it waits for."""


class ChannelJob(NamedTuple):
    """A job of a channel."""

    seconds: float
    mark: float
    """Work of all jobs up to it."""
    what: str


class RankState:
    """A pipeline rank: what it computes, and what its channel carries."""

    __slots__ = (
        "begun_s", "channel_factor", "channel_from", "channel_left", "channel_version", "done",
        "jobs", "newest", "number", "overlap", "previous", "process", "processes", "run_factor",
        "run_from", "run_left", "run_version", "running", "total", "waits_for",
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Process
        self.processes, self.overlap = 1, NO_SLOWDOWN
        self.running, self.run_left, self.run_factor, self.run_from = False, 0.0, 1.0, 0.0
        self.run_version = self.channel_version = 0
        self.jobs: deque[ChannelJob] = deque()
        self.channel_left, self.channel_factor, self.channel_from = 0.0, 1.0, 0.0
        self.total = self.done = self.newest = self.previous = self.begun_s = 0.0
        self.waits_for: float | None = None
        """Mark of the channel."""

    def state(self) -> tuple[float, float, float]:
        """What the channel has left; its progress must be settled."""
        if not self.jobs:
            return IDLE
        done = self.jobs[0].mark - self.channel_left
        return self.total - done, max(self.newest - done, 0.0), max(self.previous - done, 0.0)
