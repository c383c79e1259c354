"""What the simulator is given, and what it saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import sub
from typing import NamedTuple

from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F, K, R, Table, W
from meshwright.costmodel.stage.program import IDLE, ChannelState, Overlap, Program
from meshwright.ir.plan.schedule import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Everything that times depend on; per stage but for ways and the last three."""

    programs: tuple[tuple[Program, ...], ...]
    """By kind of action."""
    pairs: Mapping[tuple[int, int], Program]
    """(NUM_KINDS * stage + kind of each) -> what two actions do that run together."""
    overlaps: tuple[Overlap, ...]
    lanes_s: tuple[float, ...]
    """Of a message, by `Item.lane`: two of each stage."""
    offload_s: tuple[float, ...]
    processes: tuple[int, ...]
    cores: float
    talking: float
    offsets: tuple[float, ...]
    """Per pipeline rank."""
    blocks: bool = False
    """Messages keep both ends waiting."""


class TimelineEntry(NamedTuple):
    """One action as it ran."""

    action: Action
    start_s: float
    end_s: float


class Logged(NamedTuple):
    """Something that a rank or its channels did."""

    rank: int
    """Pipeline rank; of a message the one that gets it."""
    channel: str
    """compute, channel, message, to_host, to_device."""
    what: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Ran:
    """When things ran: per position of the table, and per pipeline rank.

    What a pair takes counts as of its first action; the second takes no time, at the end of it.
    """

    starts: list[float]
    ends: list[float]
    channels: list[ChannelState]
    """What each rank's channel had left when its row ended."""
    log: list[Logged] = field(default_factory=list)
    gone: dict[int, float] = field(default_factory=dict)
    """Position of a forward -> when what it offloads has left the device."""
    back: dict[int, float] = field(default_factory=dict)
    """Position of a backward -> when that begins to come back."""

    @classmethod
    def of(cls, table: Table) -> "Ran":
        """Nothing has run."""
        count = len(table.items)
        return cls([0.0] * count, [0.0] * count, [IDLE] * len(table.rows))


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step. Only what is asked for is worked out."""

    table: Table
    ran: Ran
    saved_bytes: tuple[int, ...]
    """Per stage."""
    offsets: tuple[float, ...]
    offload_bytes: tuple[int, ...] = ()
    """Per stage, of `saved_bytes`."""

    def moved(self, later_s: float, offsets: tuple[float, ...]) -> "Timeline":
        """The same, so much later."""
        later = float(later_s).__add__
        starts = list(map(later, self.ran.starts))
        ends = list(map(later, self.ran.ends))
        return replace(self, ran=Ran(starts, ends, self.ran.channels), offsets=offsets)

    @cached_property
    def row_end_s(self) -> tuple[float, ...]:
        """Per pipeline rank."""
        return tuple(self.ran.ends[row[-1]] for row in self.table.rows)

    @cached_property
    def step_s(self) -> float:
        return max(self.row_end_s)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per pipeline rank, seconds in actions."""
        lengths = list(map(sub, self.ran.ends, self.ran.starts))
        return tuple([sum(map(lengths.__getitem__, row)) for row in self.table.rows])

    @property
    def bubble(self) -> float:
        """Share of rank-seconds that no action fills."""
        whole = self.step_s * len(self.table.rows)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    @cached_property
    def entries(self) -> tuple[tuple[TimelineEntry, ...], ...]:
        """One tuple per pipeline rank."""
        starts, ends = self.ran.starts, self.ran.ends
        return tuple(
            tuple(TimelineEntry(self.table.action(p), starts[p], ends[p]) for p in row)
            for row in self.table.rows
        )

    @property
    def log(self) -> Sequence[Logged]:
        """What ran beside the actions; empty unless detail was asked for."""
        return self.ran.log

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """Per pipeline rank, the saved bytes from each point in time on."""
        return tuple(held_over_time(self, row, self.saved_bytes) for row in self.table.rows)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most saved bytes at once, per pipeline rank."""
        return tuple(max(held for _, held in row) for row in self.memory)


def held_over_time(
    timeline: Timeline, positions: Sequence[int], saved: Sequence[int]
) -> tuple[tuple[float, int], ...]:
    """(time, bytes from then on) of actions in the order of their rank."""
    held, points = 0, []
    items, ran = timeline.table.items, timeline.ran
    for position in positions:
        item = items[position]
        if item.kind in (F, K):
            held += saved[item.stage]
            points.append((ran.starts[position], held))
        elif item.kind & 3 in (B, W) and item.kind & (LAST - 1) != R:
            held -= saved[item.stage]
            points.append((ran.ends[position], held))
    return tuple(points)
