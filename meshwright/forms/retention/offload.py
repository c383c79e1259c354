"""Moved to the host's memory as the next blocks run, and back a block ahead of its backward.

On a GPU over pinned buffers, on a stream beside computing; a block's copies are over before the
next but one leaves, so that little is held twice. On a CPU to a second buffer in the same memory:
slower and no smaller, but the same path.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from meshwright.forms.retaining import Footprint, KeptMemory, RetentionRun
from meshwright.forms.retention import Retention


@dataclass(frozen=True, eq=False, slots=True)
class _Arriving:
    """On its way back: `here`, and when the copy is over."""

    event: torch.Event


class HostMemory(RetentionRun):
    """Where a stage moves what it offloads. `instead` is a buffer of the host, or an arrival."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream | None = stream(device) if device.type == "cuda" else None
        self._leaving: deque[torch.Event] = deque()
        self.ahead = self._stream is not None
        if self._stream is None:
            warn(
                f"offload on {device.type}: the host's memory is the device's, so copies to a "
                "second buffer free nothing; this is for tests of plans that are meant for GPUs",
                stacklevel=2,
            )

    def produced(self, memories: Sequence[KeptMemory]) -> None:
        if self._stream is None:
            for memory in memories:
                assert memory.here is not None
                memory.instead, memory.here = memory.here.clone(), None
        elif memories:
            if len(self._leaving) > 1:
                self._leaving.popleft().synchronize()
            self._leave_on(self._stream, memories)

    def _leave_on(self, stream: torch.cuda.Stream, memories: Sequence[KeptMemory]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for memory in memories:
                assert memory.here is not None
                buffer = torch.empty(memory.here.shape, dtype=torch.uint8, pin_memory=True)
                memory.instead = buffer.copy_(memory.here, non_blocking=True)
                memory.here.record_stream(stream)
                memory.here = None
            self._leaving.append(stream.record_event())

    def fetch(self, memories: Sequence[KeptMemory]) -> None:
        away = [memory for memory in memories if isinstance(memory.instead, Tensor)]
        if self._stream is None:
            for memory in away:
                memory.here, memory.instead = memory.instead.clone(), None
        elif away:
            self._fetch_on(self._stream, away)

    def _fetch_on(self, stream: torch.cuda.Stream, memories: Sequence[KeptMemory]) -> None:
        with torch.cuda.stream(stream):
            for memory in memories:
                memory.here = memory.instead.to(self._device, non_blocking=True)
            arrives = _Arriving(stream.record_event())
        for memory in memories:
            memory.instead = arrives

    def needed(self, memories: Sequence[KeptMemory]) -> None:
        self.fetch(memories)
        for memory in memories:
            if isinstance(memory.instead, _Arriving) and memory.here is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(memory.instead.event)
                memory.here.record_stream(current)
                memory.instead = None


def describe(dtype: str) -> Footprint:
    """All of it leaves."""
    return Footprint(held=0.0, moved=1.0)


RETENTION = Retention(describe=describe, build=HostMemory)
