"""Moves storages to the host's memory and back.

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


@dataclass(eq=False, slots=True, weakref_slot=True)
class Movable:
    """The memory behind some tensors: here, on the host, or on its way."""

    here: Tensor | None
    """All of it as bytes."""
    there: Tensor | None = None
    arrives: torch.Event | None = None

    def view(self, like: "Geometry") -> Tensor:
        """A tensor that looks into it as one did before it moved."""
        assert self.here is not None, "fetched before it is used"
        return like.into(self.here)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor looks into its storage."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        size, stride = tuple(tensor.shape), tensor.stride()
        return cls(tensor.dtype, int(tensor.storage_offset()), size, stride)

    def into(self, other: Tensor) -> Tensor:
        """A tensor of this geometry in the storage of another."""
        made = torch.empty(0, dtype=self.dtype, device=other.device)
        return made.set_(other.untyped_storage(), self.offset, self.size, self.stride)


def whole(tensor: Tensor) -> Tensor:
    """The storage of a tensor as bytes."""
    nbytes = tensor.untyped_storage().nbytes()
    return Geometry(torch.uint8, 0, (nbytes,), (1,)).into(tensor)


class HostMemory:
    """Where a stage moves what it offloads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream | None = stream(device) if device.type == "cuda" else None
        self._leaving: deque[torch.Event] = deque()
        if self._stream is None:
            warn(
                f"offload on {device.type}: the host's memory is the device's, so copies to a "
                "second buffer free nothing; this is for tests of plans that are meant for GPUs",
                stacklevel=2,
            )

    @property
    def ahead(self) -> bool:
        """Whether it helps to fetch before the block's turn."""
        return self._stream is not None

    def leave(self, parts: Sequence[Movable]) -> None:
        """Starts to move what a block offloads."""
        if self._stream is None:
            for part in parts:
                assert part.here is not None
                part.there, part.here = part.here.clone(), None
        elif parts:
            if len(self._leaving) > 1:
                self._leaving.popleft().synchronize()
            self._leave_on(self._stream, parts)

    def _leave_on(self, stream: torch.cuda.Stream, parts: Sequence[Movable]) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for part in parts:
                assert part.here is not None
                part.there = torch.empty(part.here.shape, dtype=torch.uint8, pin_memory=True)
                part.there.copy_(part.here, non_blocking=True)
                part.here.record_stream(stream)
                part.here = None
            self._leaving.append(stream.record_event())

    def fetch(self, parts: Sequence[Movable]) -> None:
        """Starts to bring back what is not here or on its way."""
        away = [part for part in parts if part.here is None and part.there is not None]
        if self._stream is None:
            for part in away:
                assert part.there is not None
                part.here, part.there = part.there.clone(), None
        elif away:
            self._fetch_on(self._stream, away)

    def _fetch_on(self, stream: torch.cuda.Stream, parts: Sequence[Movable]) -> None:
        with torch.cuda.stream(stream):
            for part in parts:
                assert part.there is not None
                part.here = part.there.to(self._device, non_blocking=True)
                part.there = None
            arrives = stream.record_event()
        for part in parts:
            part.arrives = arrives

    def wait(self, parts: Sequence[Movable]) -> None:
        """All of them are here for what is computed from now on."""
        self.fetch(parts)
        for part in parts:
            if part.arrives is not None and part.here is not None:
                current = torch.cuda.current_stream(self._device)
                current.wait_event(part.arrives)
                part.here.record_stream(current)
                part.arrives = None
