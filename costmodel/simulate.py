"""Runs any schedule table against stage costs: timeline, step time, bubbles, memory over time.

Messages are asynchronous and full duplex and do not contend with each other (an assumption). Where
pipeline ranks share CPU cores, all that run at a time are slowed alike (processor sharing).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from meshwright.ir.errors import PlanError
from meshwright.ir.schedule import Action, Schedule, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One micro-batch of one stage. Seconds when nothing else runs on its cores; bytes per rank."""

    forward_s: float
    backward_s: float
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    send_s: float = 0.0
    """Its outputs to the next stage, and as long for their gradients back."""
    saved_bytes: int = 0
    """Held from the start of a forward to the end of its (whole) backward."""
    processes: int = 1
    """Devices that run the stage together."""

    def of(self, work: Work) -> float:
        match work:
            case Work.FORWARD:
                return self.forward_s
            case Work.BACKWARD:
                return self.backward_s
            case Work.BACKWARD_INPUT:
                return self.backward_input_s
            case Work.BACKWARD_WEIGHT:
                return self.backward_weight_s


class Entry(NamedTuple):
    """One action as it ran."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the simulator saw; one tuple per pipeline rank."""

    entries: tuple[tuple[Entry, ...], ...]
    step_s: float
    bubble: float
    """Share of rank-seconds that no action fills."""
    peak_bytes: tuple[int, ...]
    """Most saved bytes at once."""
    stage_peak_bytes: tuple[int, ...] = ()
    """Per stage instead of per pipeline rank."""
    stage_end_s: tuple[float, ...] = ()
    """When each stage's last action ends."""
    memory: tuple[tuple[tuple[float, int], ...], ...] = field(default=(), repr=False)
    """Saved bytes from each point in time on."""


class _Run:
    """The state of one simulation."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageTimes], cores: float) -> None:
        self.rows = schedule.ranks
        self.stages = stages
        self.cores = cores
        self.last = len(stages) - 1
        self.heads = [0] * len(self.rows)
        self.entries: list[list[Entry]] = [[] for _ in self.rows]
        self.arrived: set[tuple[int, bool, int]] = set()
        """(stage, is backward, micro-batch): the inputs of that work are there."""
        self.waiting: dict[tuple[int, bool, int], int] = {}
        self.running: list[tuple[float, int, float]] = []
        """Heap of (virtual end, pipeline rank, real start)."""
        self.messages: list[tuple[float, tuple[int, bool, int]]] = []
        self.now = 0.0
        self.virtual = 0.0
        """Runs at the speed that an action proceeds with, so that ends in it never change."""
        self.active = 0

    def speed(self) -> float:
        return 1.0 if self.active <= self.cores else self.cores / self.active

    def start(self, rank: int) -> None:
        """Start the rank's next action, or note what it waits for."""
        row = self.rows[rank]
        if self.heads[rank] == len(row):
            return
        action = row[self.heads[rank]]
        need = self._need(action)
        if need is not None and need not in self.arrived:
            self.waiting[need] = rank
            return
        stage = self.stages[action.stage]
        heappush(self.running, (self.virtual + stage.of(action.work), rank, self.now))
        self.active += stage.processes

    def _need(self, action: Action) -> tuple[int, bool, int] | None:
        """What must arrive first; the order of its own row covers the rest (`check_schedule`)."""
        if action.work is Work.FORWARD:
            return (action.stage, False, action.microbatch) if action.stage else None
        if action.work is Work.BACKWARD_WEIGHT or action.stage == self.last:
            return None
        return action.stage, True, action.microbatch

    def finish(self, rank: int, start_s: float) -> None:
        action = self.rows[rank][self.heads[rank]]
        self.entries[rank].append(Entry(action, start_s, self.now))
        self.heads[rank] += 1
        stage = self.stages[action.stage]
        self.active -= stage.processes
        if action.work is Work.FORWARD and action.stage < self.last:
            key = (action.stage + 1, False, action.microbatch)
            heappush(self.messages, (self.now + stage.send_s, key))
        elif action.work in (Work.BACKWARD, Work.BACKWARD_INPUT) and action.stage:
            back = self.stages[action.stage - 1].send_s
            heappush(self.messages, (self.now + back, (action.stage - 1, True, action.microbatch)))
        self.start(rank)

    def deliver(self, key: tuple[int, bool, int]) -> None:
        self.arrived.add(key)
        rank = self.waiting.pop(key, None)
        if rank is not None:
            self.start(rank)

    def run(self) -> None:
        for rank in range(len(self.rows)):
            self.start(rank)
        while self.running or self.messages:
            speed = self.speed()
            ends = self.now + (self.running[0][0] - self.virtual) / speed if self.running else None
            if self.messages and (ends is None or self.messages[0][0] <= ends):
                at, key = heappop(self.messages)
                self.virtual += (at - self.now) * speed
                self.now = at
                self.deliver(key)
                continue
            assert ends is not None
            self.virtual, rank, start_s = heappop(self.running)
            self.now = max(ends, self.now)
            self.finish(rank, start_s)
        stuck = [
            f"rank {rank} at {row[head]}"
            for rank, (row, head) in enumerate(zip(self.rows, self.heads, strict=True))
            if head < len(row)
        ]
        if stuck:
            raise PlanError(f"the schedule deadlocks: {', '.join(stuck)}")


def simulate(
    schedule: Schedule, stages: Sequence[StageTimes], *, cores: float = float("inf")
) -> Timeline:
    """The timeline of one step. `cores`: processes that can run at full speed at once."""
    if schedule.num_stages != len(stages):
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages, the costs {len(stages)}"
        )
    run = _Run(schedule, stages, cores)
    run.run()
    step_s = max(row[-1].end_s for row in run.entries)
    busy = sum(entry.end_s - entry.start_s for row in run.entries for entry in row)
    memory = tuple(_memory(row, stages) for row in run.entries)
    stage_rows: list[list[Entry]] = [[] for _ in stages]
    for row in run.entries:
        for entry in row:
            stage_rows[entry.action.stage].append(entry)
    return Timeline(
        entries=tuple(map(tuple, run.entries)),
        step_s=step_s,
        bubble=1 - busy / (step_s * len(run.rows)) if step_s else 0.0,
        peak_bytes=tuple(max(held for _, held in row) for row in memory),
        stage_peak_bytes=tuple(max(held for _, held in _memory(row, stages)) for row in stage_rows),
        stage_end_s=tuple(row[-1].end_s for row in stage_rows),
        memory=memory,
    )


def _memory(row: Sequence[Entry], stages: Sequence[StageTimes]) -> tuple[tuple[float, int], ...]:
    """(time, saved bytes from then on) of one pipeline rank."""
    held = 0
    points = []
    for entry in row:
        work = entry.action.work
        if work is Work.FORWARD:
            held += stages[entry.action.stage].saved_bytes
            points.append((entry.start_s, held))
        elif work is not Work.BACKWARD_INPUT:
            held -= stages[entry.action.stage].saved_bytes
            points.append((entry.end_s, held))
    return tuple(points)
