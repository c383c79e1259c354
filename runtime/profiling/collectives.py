"""Times collectives and messages over every kind of group that a cluster's plans use.

A time is what a collective adds to computing, as training sees it: members come out of computation,
as much on each, and with buffers just written.
All groups of a kind work at the same time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from time import perf_counter, process_time

import psutil
import torch
import torch.distributed as dist

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OPERATIONS
from meshwright.ir.heap import keep_freed_memory
from meshwright.ir.profile.profile import CollectiveRecord, GroupShape
from meshwright.runtime.profiling.clocks import (
    GroupClock,
    Span,
    is_crowded,
    loaded_clock,
    make_clock,
    message_clock,
)
from meshwright.runtime.profiling.exchange import RepeatedExchange
from meshwright.runtime.profiling.load import WINDOW_S, BusyLoad, Pace, mean_pace, measured_pace
from meshwright.runtime.profiling.timings import averaged

SIZES = tuple(4**i for i in range(5, 16))
"""1 KiB to 1 GiB."""
LOADED = ("all_reduce", "all_gather", "reduce_scatter")
_LOADED_BYTES = 2**18
_CROWDED_BYTES = (2**24, 2**22, 2**18)
"""Beside computing where cores are shared: what buckets of gradients have comes first, since long
messages slow computing by more than short ones do, and rounds take long there."""
_FEWEST, _MOST = 5, 25
_LOOKS = 2
_LOOKING_S = (_LOOKS + 1) * WINDOW_S
_SHORTEST_S = 1e-4
_MEMORY_SHARE = 0.0625


@dataclass(frozen=True, slots=True)
class _Task:
    """One operation over one kind of group, for all sizes."""

    shape: GroupShape
    operation: str
    loaded: bool


def group_shapes(cluster: Cluster) -> tuple[GroupShape, ...]:
    """The kinds of groups of a cluster of equal nodes: inside a node, over both, across nodes."""
    inside = min(len(node.devices) for node in cluster.nodes)
    nodes = cluster.num_nodes
    sizes = [n for n in range(2, inside + 1) if inside % n == 0 or n == 2]
    found = [GroupShape(size=n, per_node=n) for n in sizes]
    if nodes > 1 and all(len(node.devices) == inside for node in cluster.nodes):
        across = [n for n in range(2, nodes + 1) if nodes % n == 0 or n == 2]
        found += [GroupShape(size=n, per_node=1, stride=inside) for n in across]
        if inside > 1:
            found.append(GroupShape(size=nodes * inside, per_node=inside))
    return tuple(found)


def members(shape: GroupShape, world: int) -> tuple[tuple[int, ...], ...]:
    """The groups of that kind, all that fit beside each other."""
    span = shape.size * shape.stride
    return tuple(
        tuple(range(first + offset, first + span, shape.stride))
        for first in range(0, world - span + 1, span)
        for offset in range(shape.stride)
    )


def measure_collectives(
    cluster: Cluster,
    shapes: Sequence[GroupShape] | None = None,
    *,
    budget_s: float,
    rank: int,
    world: int,
    sizes: Sequence[int] = SIZES,
    device: torch.device | None = None,
) -> Iterator[CollectiveRecord]:
    """Records as they are made; every rank of the default process group iterates to the end.

    All ranks yield the same records. A size that the budget or the memory does not allow is left
    out, and all larger ones with it. `device`: of the process group; the CPU unless given.
    """
    device = device or torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()  # as ranks do
    ends = perf_counter() + budget_s
    kinds = [s for s in (shapes or group_shapes(cluster)) if members(s, world)]
    tasks = _tasks(kinds)
    groups = {shape: _join(shape, rank, world) for shape in kinds}
    load = BusyLoad(device)
    limit = _memory_limit(device, world, cluster)
    for left, task in zip(count(len(tasks), -1), tasks, strict=False):
        exchange = RepeatedExchange(task.operation, groups[task.shape], device)
        clock = _clock(task, device, cluster)
        share = clock.agree(max(0.0, ends - perf_counter()) / left)
        lines = members(task.shape, world)
        if task.operation == "send" and is_crowded(cluster):
            lines = lines[:1]
        runner = _Runner(clock, exchange, load, task, lines, crowded=is_crowded(cluster))
        yield from runner.sizes([n for n in sizes if n <= limit], share)


def _tasks(kinds: Sequence[GroupShape]) -> list[_Task]:
    """All operations alone, then what overlaps with computation; messages go between two."""
    alone = [_Task(s, op, False) for s in kinds for op in OPERATIONS if op != "send" or s.size == 2]
    return alone + [_Task(s, op, True) for s in kinds for op in LOADED]


def _clock(task: _Task, device: torch.device, cluster: Cluster) -> GroupClock:
    if task.operation == "send":
        return message_clock(device, cluster)
    return (loaded_clock if task.loaded else make_clock)(device, cluster, task.shape.size)


def _join(shape: GroupShape, rank: int, world: int) -> dist.ProcessGroup | None:
    """This rank's group of the kind, if it is in one; made in the same order on every rank."""
    mine = None
    for line in members(shape, world):
        group = dist.new_group(list(line))
        if rank in line:
            mine = group
    return mine


def _memory_limit(device: torch.device, world: int, cluster: Cluster) -> int:
    """Bytes of a collective that leave room for its result and what surrounds it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _MEMORY_SHARE)
    per_node = -(-world // cluster.num_nodes)
    return int(psutil.virtual_memory().available * _MEMORY_SHARE / per_node)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round on one rank."""

    span: Span
    beside: int
    """Pieces computed meanwhile."""
    units: int
    """Pieces computed before it, and their processor time."""
    busy_s: float


@dataclass(frozen=True, slots=True)
class _Runner:
    """Measures one task on one rank; ranks without a group join the clock's exchanges alone.

    Where cores are shared one pair at a time sends messages and the others compute, as stages of a
    pipeline do: a process that waited gets a core back when the scheduler lets it.
    """

    clock: GroupClock
    exchange: RepeatedExchange
    load: BusyLoad
    task: _Task
    lines: tuple[tuple[int, ...], ...]
    crowded: bool

    def sizes(self, sizes: Sequence[int], budget_s: float) -> Iterator[CollectiveRecord]:
        """One size after the other until the next would use up the budget; the first in any
        case."""
        ends = perf_counter() + budget_s
        wanted = self._wanted(sizes)
        round_s = 0.0
        for index, nbytes in enumerate(wanted):
            left = self._left(ends)
            # A round of the next size takes at least as long, if it is larger.
            if index and left < (_FEWEST + 1) * round_s:
                return
            self._rounds(nbytes, 1)
            after = self._left(ends)
            round_s = max(left - after, _SHORTEST_S)
            if index and after < _FEWEST * round_s:
                return
            share = (after / (len(wanted) - index) - _LOOKING_S) / round_s
            seconds, slowdown = self._rounds(nbytes, round(min(_MOST, max(_FEWEST, share))))
            yield CollectiveRecord(
                operation=self.task.operation,
                nbytes=nbytes,
                group=self.task.shape,
                groups_at_once=dist.get_world_size() // self.task.shape.size,
                time=averaged(seconds),
                loaded=self.task.loaded,
                compute_slowdown=slowdown,
            )

    def _wanted(self, sizes: Sequence[int]) -> list[int]:
        """Ascending; where cores are shared, beside computing, the few that matter."""
        if not self.task.loaded:
            return list(sizes)
        if self.crowded:
            return [n for n in _CROWDED_BYTES if n <= max(sizes)]
        return [n for n in sizes if n >= _LOADED_BYTES]

    def _left(self, ends: float) -> float:
        """Seconds of the budget, the same on every rank."""
        return self.clock.agree(max(0.0, ends - perf_counter()))

    def _rounds(self, nbytes: int, rounds: int) -> tuple[list[float], float]:
        """(seconds of each round, median slowdown of computation), the same on every rank."""
        self.load.begin()
        if rounds == 1:  # to warm up
            seen = self._seen(nbytes, 1)
            return self.clock.together(self.lines, [one.span for one in seen], [1.0], 1)
        paces, seen = [self._pace()], []
        for some in _parts(rounds):
            seen += self._seen(nbytes, some)
            paces.append(self._pace())
        pace = mean_pace(paces)
        spans = [self._charged(one, pace) for one in seen]
        slow = [self._slowdown(one, pace) for one in seen]
        return self.clock.together(self.lines, spans, slow, rounds)

    def _pace(self) -> Pace:
        return measured_pace(self.load, self.clock.synchronize)

    def _seen(self, nbytes: int, rounds: int) -> list[_Round]:
        group = self.exchange.group
        if group is None or dist.get_rank() not in chain(*self.lines):
            for _ in range(rounds if self.task.operation == "send" else 0):
                self.load.some()
            return []
        self.exchange.prepare(nbytes)
        return [self._round(group) for _ in range(rounds)]

    def _round(self, group: dist.ProcessGroup) -> _Round:
        self.exchange.fill()
        before = process_time()
        units = 0 if self.exchange.waits else self.load.some()
        busy_s = process_time() - before
        if self.task.loaded:
            span, beside = self.clock.beside(group, self.exchange.start, self.load.unit)
            return _Round(span, beside, units, busy_s)
        return _Round(self.clock.timed(group, self.exchange.run), 0, units, busy_s)

    def _charged(self, one: _Round, pace: Pace) -> Span:
        """With what computing before it took more than alone: caches were filled by others."""
        if self.task.loaded or self.exchange.device.type != "cpu":
            return one.span
        return self.clock.with_slowed(one.span, one.busy_s - one.units * pace.busy_s)

    def _slowdown(self, one: _Round, pace: Pace) -> float:
        """Of the computing beside it. Where cores are shared, by the processor time that is not
        computing's own: on the wall it depends on who else has a core just then."""
        if not one.beside:
            return 1.0
        start, end, busy_s = one.span
        if self.crowded:
            return busy_s / (one.beside * pace.busy_s)
        return (end - start) / (one.beside * pace.wall_s)


def _parts(rounds: int) -> tuple[int, ...]:
    """The rounds in a few parts: the machine's speed is looked at between them, as it changes."""
    parts = min(_LOOKS, rounds)
    return tuple((rounds + number) // parts for number in range(parts))
