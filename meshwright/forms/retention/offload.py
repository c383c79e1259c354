"""Moved to the host's memory as the next blocks run, and back a block ahead of its backward.

On a GPU over pinned buffers, on a stream beside computing; a block's copies are over before the
next but one leaves, so that little is held twice. The device sees to that: the host waits for
nothing. On a CPU to a second buffer in the same memory: slower and no smaller, but the same path;
over a link that is shaped (`forms.host_link`) as on a GPU, beside all else that goes over it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from meshwright.forms.host_link import CopyOnStream, HostLink, host_link
from meshwright.forms.retaining import Footprint, KeptMemory, RetentionRun
from meshwright.forms.retention import Retention
from meshwright.ir.comm.p2p_collectives import Waitable


@dataclass(frozen=True, eq=False, slots=True)
class _Away:
    """On the host, or on its way there over a shaped link."""

    room: Tensor
    left: Waitable


@dataclass(frozen=True, eq=False, slots=True)
class _Coming:
    """On its way back, to where it is `here`."""

    work: Waitable


class HostMemory(RetentionRun):
    """Where a stage moves what it offloads. `instead` is a buffer of the host, or an arrival."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream | None = stream(device) if device.type == "cuda" else None
        self._leaving: deque[list[CopyOnStream]] = deque()
        self._link = host_link(device) if self._stream is None else None
        self._going: deque[list[Waitable]] = deque()
        self.ahead = self._stream is not None or self._is_shaped
        if not self.ahead:
            warn(
                f"offload on {device.type}: the host's memory is the device's, so copies to a "
                "second buffer free nothing; this is for tests of plans that are meant for GPUs",
                stacklevel=2,
            )

    @property
    def _is_shaped(self) -> bool:
        return self._link is not None and self._link.apart

    def produced(self, memories: Sequence[KeptMemory]) -> None:
        if self._link is not None and self._link.apart:
            self._leave_over(self._link, memories)
        elif self._stream is None:
            for memory in memories:
                assert memory.here is not None
                memory.instead, memory.here = memory.here.clone(), None
        elif memories:
            self._let_go(keep=1)
            self._leave_on(self._stream, memories)

    def _let_go(self, keep: int) -> None:
        """What has left is free on the stream that computes, which comes after the copies: kept for
        another stream, it would be free when the host next looks, at a time that nobody knows."""
        while len(self._leaving) > keep:
            for copy in self._leaving.popleft():
                copy.wait()

    def _leave_over(self, link: HostLink, memories: Sequence[KeptMemory]) -> None:
        while memories and len(self._going) > 1:
            for work in self._going.popleft():
                work.wait()
        works = []
        for memory in memories:
            assert memory.here is not None
            room = link.room(memory.here)
            works.append(link.leave(memory.here, room))
            memory.instead, memory.here = _Away(room, works[-1]), None
        if works:
            self._going.append(works)

    def _fetch_over(self, link: HostLink, memories: Sequence[KeptMemory]) -> None:
        for memory in memories:
            if isinstance(memory.instead, _Away):
                memory.instead.left.wait()
                memory.here = torch.empty_like(memory.instead.room)
                memory.instead = _Coming(link.arrive(memory.instead.room, memory.here))

    def _leave_on(self, stream: torch.cuda.Stream, memories: Sequence[KeptMemory]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copies = []
            for memory in memories:
                assert memory.here is not None
                buffer = torch.empty(memory.here.shape, dtype=torch.uint8, pin_memory=True)
                memory.instead = buffer.copy_(memory.here, non_blocking=True)
                copies.append(CopyOnStream(stream, memory.here, self._device))
                memory.here = None
        self._leaving.append(copies)

    def fetch(self, memories: Sequence[KeptMemory]) -> None:
        away = [memory for memory in memories if isinstance(memory.instead, Tensor)]
        if self._link is not None and self._link.apart:
            self._fetch_over(self._link, memories)
        elif self._stream is None:
            for memory in away:
                memory.here, memory.instead = memory.instead.clone(), None
        elif away:
            self._fetch_on(self._stream, away)

    def _fetch_on(self, stream: torch.cuda.Stream, memories: Sequence[KeptMemory]) -> None:
        self._let_go(keep=0)  # no later block of this forward leaves
        came = [torch.empty_like(m.instead, device=self._device) for m in memories]
        stream.wait_stream(torch.cuda.current_stream(self._device))  # whose memory that was
        with torch.cuda.stream(stream):
            for memory, here in zip(memories, came, strict=True):
                memory.here = here.copy_(memory.instead, non_blocking=True)
        for memory, here in zip(memories, came, strict=True):
            memory.instead = _Coming(CopyOnStream(stream, here, self._device))

    def needed(self, memories: Sequence[KeptMemory]) -> None:
        self.fetch(memories)
        for memory in memories:
            if isinstance(memory.instead, _Coming):
                memory.instead.work.wait()
                memory.instead = None


def describe(dtype: str) -> Footprint:
    """All of it leaves."""
    return Footprint(held=0.0, moved=1.0)


RETENTION = Retention(describe=describe, build=HostMemory)
