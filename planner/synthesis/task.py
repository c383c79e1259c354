"""What a schedule is made for: stage times, where stages are, memory; and judging a schedule.

Equal micro-batches pass every stage first in, first out. Nothing is lost by that: give the k-th
forward of a stage to micro-batch k, likewise its backwards, and every wait and every count of
micro-batches that are held stays as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.costmodel.simulate.compiled_schedule import LAST, WORKS, B, F, I, W
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.program import IDLE, play
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Action, Schedule, Work

Row = list[tuple[int, int]]
"""Stage and kind (`costmodel.simulate.compiled_schedule`) of each action of a pipeline rank, in
order."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """All that a schedule depends on."""

    stages: tuple[StageTimes, ...]
    placement: tuple[int, ...]
    """Stage -> pipeline rank."""
    num_microbatches: int
    capacity_bytes: tuple[float, ...] = ()
    """Per rank, for `saved_bytes` of micro-batches in flight and what else is held of them; no
    limit if empty."""
    halved_bytes: tuple[int, ...] = ()
    """Per stage: held from the input half of a backward to the end of its weight half; none if
    empty."""
    release_s: tuple[float, ...] = ()
    """Per rank: no action starts before; zero if empty."""
    cores: float = float("inf")

    def __post_init__(self) -> None:
        ranks = sorted(set(self.placement))
        if len(self.placement) != len(self.stages) or ranks != list(range(len(ranks))):
            raise PlanError(
                f"placement {self.placement} of {len(self.stages)} stages: each stage needs a rank "
                f"and each rank up to {max(self.placement, default=0)} a stage"
            )
        if self.num_microbatches < 1:
            raise PlanError(f"{self.num_microbatches} micro-batches; there must be at least 1")
        for name, given, wanted in (
            ("capacity_bytes", self.capacity_bytes, len(ranks)),
            ("halved_bytes", self.halved_bytes, len(self.stages)),
            ("release_s", self.release_s, len(ranks)),
        ):
            if given and len(given) != wanted:
                raise PlanError(f"{len(given)} values of {name}; nearest is {wanted}, or none")

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(self.placement)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        every = range(len(self.placement))
        return tuple(
            tuple(s for s in every if self.placement[s] == rank) for rank in range(self.num_ranks)
        )

    @cached_property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """Per stage those of F, B, I and W with the rank's channel idle."""
        return tuple(
            tuple(play(stage.program(kind).steps, IDLE, stage.overlap)[0] for kind in (F, B, I, W))
            for stage in self.stages
        )

    @cached_property
    def least_s(self) -> tuple[tuple[float, ...], ...]:
        """The same, at least: whatever the channel does, the last of a stage or not."""
        return tuple(
            tuple(
                min(stage.program(kind).own_s, stage.program(kind + LAST).own_s)
                for kind in (F, B, I, W)
            )
            for stage in self.stages
        )

    @cached_property
    def sends_s(self) -> tuple[float, ...]:
        """From each stage to the next, and back; nothing within a rank."""
        ranks = self.placement
        return tuple(
            stage.send_s if s + 1 < len(ranks) and ranks[s] != ranks[s + 1] else 0.0
            for s, stage in enumerate(self.stages)
        )

    @cached_property
    def halved(self) -> tuple[int, ...]:
        return self.halved_bytes or (0,) * len(self.stages)

    @cached_property
    def capacity(self) -> tuple[float, ...]:
        return self.capacity_bytes or (float("inf"),) * self.num_ranks

    @cached_property
    def release(self) -> tuple[float, ...]:
        return self.release_s or (0.0,) * self.num_ranks


def to_schedule(name: str, rows: Sequence[Row]) -> Schedule:
    """The schedule of rows whose micro-batches go first in, first out."""
    return Schedule(name, tuple(tuple(_numbered(row)) for row in rows))


def _numbered(row: Row) -> list[Action]:
    begun: dict[tuple[int, bool], int] = {}
    split: dict[int, list[int]] = {}
    found = []
    for stage, kind in row:
        if kind == W:
            number = split[stage].pop(0)
        else:
            number = begun.get((stage, kind == F), 0)
            begun[stage, kind == F] = number + 1
            if kind == I:
                split.setdefault(stage, []).append(number)
        found.append(Action(stage, WORKS[kind], number))
    return found


def to_rows(schedule: Schedule) -> list[Row]:
    """The order alone."""
    codes = {work: code for code, work in enumerate(WORKS)}
    return [[(a.stage, codes[a.work]) for a in row] for row in schedule.ranks]


def step_s(task: Task, schedule: Schedule) -> float:
    """When the last rank is done, by the event simulator."""
    return simulate(schedule, task.stages, cores=task.cores, offsets=task.release).step_s


def excess_bytes(task: Task, schedule: Schedule) -> float:
    """By how much the worst rank holds more than it may; 0 if none does."""
    peaks = peaks_bytes(task, schedule)
    return max(0.0, *(peak - room for peak, room in zip(peaks, task.capacity, strict=True)))


def peaks_bytes(task: Task, schedule: Schedule) -> tuple[int, ...]:
    """The most that each rank holds of micro-batches."""
    return tuple(_peak_bytes(task, row) for row in schedule.ranks)


def _peak_bytes(task: Task, row: Sequence[Action]) -> int:
    held = most = 0
    for action in row:
        stage, work = action.stage, action.work
        if work is Work.FORWARD:
            held += task.stages[stage].saved_bytes
        elif work is Work.BACKWARD_INPUT:
            held += task.halved[stage]
        most = max(most, held)
        if work is Work.BACKWARD:
            held -= task.stages[stage].saved_bytes
        elif work is Work.BACKWARD_WEIGHT:
            held -= task.stages[stage].saved_bytes + task.halved[stage]
    return most
