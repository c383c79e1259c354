"""The link between a device and the memory of its host: copies each way, one after the other,
beside what the device computes.

On a GPU each way is a stream, and the host's side is pinned. On a CPU host and device are one
memory: a copy is done at once, unless the link is shaped (`shaped`, or MESHWRIGHT_HOST_LINK, such
as `2GB/s`). Then each way is a thread that takes as long as such a link, and what lies on the host
counts as no memory of the device: plans for GPUs can so be run and measured without one.
"""

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.ir.cluster.device import parse_quantity
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import storage_key

VARIABLE = "MESHWRIGHT_HOST_LINK"
Way = Literal["host", "device"]
_ROOMS: dict[int, weakref.ref[Any]] = {}
"""Memory of the host, by key."""
_watchers: list[Callable[[Tensor], None]] = []
_links: dict[object, "HostLink"] = {}
_shape: list[float | None] = []
"""Bytes per second each way, the innermost `shaped` last."""


class HostLink:
    """Copies within one memory, which are done when they have been asked for."""

    apart = False
    """Whether the host's memory is another than the device's."""

    def room(self, like: Tensor) -> Tensor:
        """Returns memory of the host for the values of a tensor, of its shape and dtype."""
        return torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)

    def leave(self, here: Tensor, host: Tensor) -> Waitable:
        """Starts a copy to the host. When it has been waited for, the host may read it."""
        return self._copy("host", here, host)

    def arrive(self, host: Tensor, here: Tensor) -> Waitable:
        """Starts a copy from the host. When it has been waited for, the device may read it."""
        return self._copy("device", host, here)

    def _copy(self, to: Way, source: Tensor, target: Tensor) -> Waitable:
        with torch.no_grad():
            target.copy_(source)
        return _AT_ONCE


class _AtOnce:
    def wait(self) -> None:
        return


_AT_ONCE = _AtOnce()


class _Job:
    """A copy on a shaped link."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self.tensors: tuple[Tensor, Tensor] | None = (source, target)
        self.over = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


class ShapedLink(HostLink):
    """As long as a link of so many bytes per second each way would take."""

    apart = True

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._ways: dict[Way, queue.SimpleQueue[_Job | None]] = {}
        self._opening = threading.Lock()
        """Several threads may ask for copies."""

    def room(self, like: Tensor) -> Tensor:
        return _noted(super().room(like))

    def _copy(self, to: Way, source: Tensor, target: Tensor) -> Waitable:
        job = _Job(source.detach(), target.detach())
        self._way(to).put(job)
        return job

    def _way(self, to: Way) -> "queue.SimpleQueue[_Job | None]":
        with self._opening:
            if to not in self._ways:
                jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
                thread = threading.Thread(target=self._carry, args=(jobs,), daemon=True)
                thread.start()
                # One that still copies while Python goes away would end the process by a signal.
                atexit.register(_end, os.getpid(), jobs, thread)
                self._ways[to] = jobs
            return self._ways[to]

    @torch.no_grad()
    def _carry(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        free = 0.0
        while (job := jobs.get()) is not None:
            assert job.tensors is not None
            source, target = job.tensors
            # A sleep that was too long makes up for itself in the next copy.
            now = time.perf_counter()
            free = (free if now - free < _LATE_S else now) + source.nbytes / self._rate
            try:
                target.copy_(source)
                time.sleep(max(0.0, free - time.perf_counter()))
            except BaseException as error:  # whoever waits raises it, and would else wait for ever
                job.error = error
            # Nothing here holds memory that the job's owner has let go.
            job.tensors = source = target = None  # type: ignore[assignment]
            job.over.set()


def _end(process: int, jobs: "queue.SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    if process == os.getpid():  # a forked one has no such thread
        jobs.put(None)
        thread.join(_LAST_S)


_LAST_S = 10.0
"""For copies that nobody has waited for when a process ends."""
_LATE_S = 2e-3
"""By which a thread may wake up late."""


class CopyOnStream:
    """A copy on a stream: who waits for it is the host, or the device's computing. Until then it
    holds the device's side. Memory that is freed while a second stream is at it is free when the
    host next looks, and a host that is ahead of its device would take more instead."""

    def __init__(self, stream: torch.cuda.Stream, held: Tensor, waits: torch.device | None) -> None:
        """What was sent to a stream; `waits`: the device that waits for it, None: the host."""
        self._stream, self._event, self._waits = stream, stream.record_event(), waits
        self._held: Tensor | None = held

    def wait(self) -> None:
        if self._waits is None:
            self._event.synchronize()
        else:
            torch.cuda.current_stream(self._waits).wait_event(self._event)
        self._held = None

    def __del__(self) -> None:
        """Nobody has waited, as where a step fails: nobody may have the memory until it is over."""
        if self._held is not None and not sys.is_finalizing():
            self._held.record_stream(self._stream)


class StreamLink(HostLink):
    """Of a GPU: a stream each way, over pinned memory."""

    apart = True

    def __init__(self, device: torch.device) -> None:
        made: Any = torch.cuda.Stream
        self._device = device
        self._streams: dict[Way, torch.cuda.Stream] = {
            "host": made(device), "device": made(device)
        }  # fmt: skip

    def room(self, like: Tensor) -> Tensor:
        return _noted(torch.empty(like.shape, dtype=like.dtype, pin_memory=True))

    def _copy(self, to: Way, source: Tensor, target: Tensor) -> Waitable:
        stream = self._streams[to]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
        if to == "host":
            return CopyOnStream(stream, source, None)
        return CopyOnStream(stream, target, self._device)


def host_link(device: torch.device) -> HostLink:
    """Returns the link of a device in this process: all who copy share it."""
    rate = rate_of_shape() if device.type == "cpu" else None
    key = os.getpid(), device, rate  # threads are not there in a forked process
    if key not in _links:
        if device.type == "cuda":
            _links[key] = StreamLink(device)
        else:
            _links[key] = HostLink() if rate is None else ShapedLink(rate)
    return _links[key]


def rate_of_shape() -> float | None:
    """Returns bytes per second each way of a shaped link; None: there is none. PlanError if the
    variable says no rate."""
    if _shape:
        return _shape[-1]
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    rate = parse_quantity(text, "rate")
    if not isinstance(rate, float) or not 1e3 <= rate <= 1e15:
        raise PlanError(f"{VARIABLE} is {text[:40]!r}; it must be a rate, such as 2GB/s")
    return rate


@contextmanager
def shaped(bytes_per_s: float | None) -> Iterator[None]:
    """Shapes the link of CPUs in this process, or with None takes it as one memory."""
    _shape.append(bytes_per_s)
    try:
        yield
    finally:
        _shape.pop()


def is_on_host(tensor: Tensor) -> bool:
    """Tells whether a tensor lies in memory that a link has made room in, apart from its
    device's."""
    found = _ROOMS.get(storage_key(tensor))
    return found is not None and found() is not None


@contextmanager
def watching_rooms(made: Callable[[Tensor], None]) -> Iterator[None]:
    """Tells of all room that links make in memory apart from their devices'."""
    _watchers.append(made)
    try:
        yield
    finally:
        _watchers.remove(made)


def _noted(room: Tensor) -> Tensor:
    key = storage_key(room)
    for watcher in _watchers:
        watcher(room)
    _ROOMS[key] = weakref.ref(room.untyped_storage(), lambda _: _ROOMS.pop(key, None))
    return room
