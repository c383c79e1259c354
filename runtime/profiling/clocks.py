"""What times a collective among several ranks: one clock for all of a host, or CUDA events."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import ceil, isnan, nan
from statistics import mean, median
from threading import Thread
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.comm.p2p_collectives import Waitable

Span = tuple[float, float, float]
"""Start, end, and processor time of one rank in one collective, in seconds."""
Lines = Sequence[Sequence[int]]
"""The groups of one kind: their global ranks."""


class GroupClock(ABC):
    """Seconds that the members of a group agree on."""

    device = torch.device("cpu")

    @abstractmethod
    def timed(self, group: dist.ProcessGroup, run: Callable[[], None]) -> Span:
        """When this rank came to the collective and when it left."""

    @abstractmethod
    def beside(
        self, group: dist.ProcessGroup, start: Callable[[], Waitable], unit: Callable[[], None]
    ) -> tuple[Span, int]:
        """The same while this rank computes, and how many units it computed meanwhile."""

    @abstractmethod
    def of_group(self, spans: Sequence[Span]) -> float:
        """Seconds of a collective from what its members saw; in one round less than none if the
        computing before it happened to be quick."""

    @abstractmethod
    def synchronize(self) -> None:
        """All that was started on this rank is over."""

    def with_slowed(self, span: Span, slowed_s: float) -> Span:
        """The span if computing around the collective took so much more processor time."""
        return span

    def agree(self, value: float) -> float:
        """The least of all ranks' values."""
        held = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(held, op=dist.ReduceOp.MIN)
        return float(held)

    def together(
        self, lines: Lines, spans: Sequence[Span], slow: Sequence[float], rounds: int
    ) -> tuple[list[float], float]:
        """(seconds of every round of every group, median of `slow`), the same on every rank."""
        mine = [x for span in spans for x in span] + [median(slow)] if spans else []
        sent = torch.full((3 * rounds + 1,), nan, dtype=torch.float64, device=self.device)
        sent[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        held = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(held, sent)
        every = [x.tolist() for x in held]
        seconds = [
            self.of_group([_span(every[rank][3 * i : 3 * i + 3]) for rank in line])
            for line in lines
            for i in range(rounds)
        ]
        return seconds, median(x[-1] for x in every if not isnan(x[-1]))


def _span(values: Sequence[float]) -> Span:
    start, end, busy = values
    return start, end, busy


class HostClock(GroupClock):
    """Processes of one host share a clock: from the last to come to the last to leave."""

    def timed(self, group: dist.ProcessGroup, run: Callable[[], None]) -> Span:
        busy, start = process_time(), perf_counter()
        run()
        return start, perf_counter(), process_time() - busy

    def beside(
        self, group: dist.ProcessGroup, start: Callable[[], Waitable], unit: Callable[[], None]
    ) -> tuple[Span, int]:
        ended: list[float] = []
        busy, began = process_time(), perf_counter()
        # Some works of Gloo complete only in `wait`, so another thread has to wait for them.
        watcher = Thread(target=_note_end, args=(start(), ended))
        watcher.start()
        units = 0
        while not ended:
            unit()
            units += 1
        watcher.join()
        return (began, ended[0], process_time() - busy), units

    def synchronize(self) -> None:
        pass

    def of_group(self, spans: Sequence[Span]) -> float:
        return max(end for _, end, _ in spans) - max(start for start, _, _ in spans)


class SharedClock(HostClock):
    """Processes of one host whose computing a collective slows down: its caches are filled by
    others meanwhile, and the scheduler moves it. All wait for each other on cores that they share.

    `per_core`: processes per core. What takes longer is processor time, which those that only wait
    do not disturb.
    """

    def __init__(self, per_core: float) -> None:
        self.per_core = per_core

    def with_slowed(self, span: Span, slowed_s: float) -> Span:
        start, end, busy = span
        return start - slowed_s * self.per_core, end, busy + slowed_s


class HeldUpClock(SharedClock):
    """Processes with a core each: how long a collective holds up its members, on average.

    Waiting for members that come later after as much work is part of what it costs them.
    """

    def of_group(self, spans: Sequence[Span]) -> float:
        return mean(end - start for start, end, _ in spans)


class CrowdedClock(SharedClock):
    """Part of the processes of a host that has fewer cores: while some wait for each other the rest
    has their cores, so only processor time counts; it is charged as computation is."""

    def of_group(self, spans: Sequence[Span]) -> float:
        return mean(busy for _, _, busy in spans) * self.per_core


def _note_end(work: Waitable, ended: list[float]) -> None:
    work.wait()
    ended.append(perf_counter())


class ApartClock(HostClock):
    """Hosts without a common clock: members meet just before, and the slowest counts."""

    def timed(self, group: dist.ProcessGroup, run: Callable[[], None]) -> Span:
        dist.barrier(group)
        return super().timed(group, run)

    def of_group(self, spans: Sequence[Span]) -> float:
        return max(end - start for start, end, _ in spans)


class CudaClock(GroupClock):
    """Events on the device; members meet just before, and the slowest counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._meeting = torch.zeros(1, device=device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._units = 4

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def timed(self, group: dist.ProcessGroup, run: Callable[[], None]) -> Span:
        first, last = _events(2)
        dist.all_reduce(self._meeting, group=group)
        first.record()
        run()
        last.record()
        last.synchronize()
        return 0.0, first.elapsed_time(last) / 1e3, 0.0

    def beside(
        self, group: dist.ProcessGroup, start: Callable[[], Waitable], unit: Callable[[], None]
    ) -> tuple[Span, int]:
        """Computation is queued for as long as the collective took the last time, and half more."""
        first, computed, arrived = _events(3)
        dist.all_reduce(self._meeting, group=group)
        first.record()
        work = start()
        units = self._units
        for _ in range(units):
            unit()
        computed.record()
        with torch.cuda.stream(self._side):
            work.wait()
            arrived.record()
        self.synchronize()
        seconds, all_s = first.elapsed_time(arrived) / 1e3, first.elapsed_time(computed) / 1e3
        self._units = min(4096, max(4, ceil(1.5 * units * seconds / all_s)))
        return (0.0, seconds, 0.0), max(1, round(units * min(1.0, seconds / all_s)))

    def of_group(self, spans: Sequence[Span]) -> float:
        return max(end - start for start, end, _ in spans)


def _events(count: int) -> list[torch.cuda.Event]:
    event: Any = torch.cuda.Event
    return [event(enable_timing=True) for _ in range(count)]


def make_clock(device: torch.device, cluster: Cluster, size: int) -> GroupClock:
    """The clock for groups of `size` ranks of the default process group that do nothing else."""
    if device.type == "cuda":
        return CudaClock(device)
    if cluster.num_nodes > 1:
        return ApartClock()
    processes, cores = len(cluster.nodes[0].devices), cluster.nodes[0].cores or size
    if cores >= processes:
        return HeldUpClock(1.0)
    return (CrowdedClock if size < processes else SharedClock)(processes / cores)


def message_clock(device: torch.device, cluster: Cluster) -> GroupClock:
    """The clock for messages: they are on their way while their receivers wait."""
    if device.type == "cpu" and cluster.num_nodes == 1:
        return HostClock()
    return make_clock(device, cluster, 2)


def loaded_clock(device: torch.device, cluster: Cluster, size: int) -> GroupClock:
    """The clock for collectives beside computing.

    Where processes share cores members begin far apart, and the last to come counts.
    """
    crowded = is_crowded(cluster)
    return message_clock(device, cluster) if crowded else make_clock(device, cluster, size)


def is_crowded(cluster: Cluster) -> bool:
    """Whether processes share cores."""
    return any(0 < node.cores < len(node.devices) for node in cluster.nodes)
