"""Sends the next batch to a GPU while it computes: on a stream of its own, from pinned memory."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

Parts = dict[tuple[int, int], dict[str, Tensor]]
"""(stage, micro-batch) -> input name -> this rank's part."""


class InputLane:
    """The stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        made: Any = torch.cuda.Stream
        self._device = device
        self._stream: torch.cuda.Stream = made(device)

    @classmethod
    def of(cls, device: torch.device) -> Self | None:
        """That of a device; None for a CPU, which reads what the host has."""
        return cls(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is sent inside goes beside what the device computes."""
        with torch.cuda.stream(self._stream):
            yield

    def arrived(self, sent: Iterable[Tensor]) -> None:
        """The device computes on with what was sent once it is there; the host goes on at once."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for x in sent:
            if x.device.type == "cuda":
                x.record_stream(current)


@dataclass(frozen=True, eq=False)
class ComingBatch:
    """A batch that was sent ahead."""

    given: Mapping[str, Tensor]
    versions: Mapping[str, int]
    """Of the batch's tensors, when they were sent: who writes to one in place changes it."""
    sharded: bool
    parts: Parts

    @classmethod
    def of(cls, given: Mapping[str, Tensor], sharded: bool, parts: Parts) -> Self:
        return cls(given, {n: x._version for n, x in given.items()}, sharded, parts)

    def is_this(self, given: Mapping[str, Tensor], sharded: bool) -> bool:
        """Whether it is a batch of these tensors, and they are as they were."""
        return sharded == self.sharded and given.keys() == self.given.keys() and all(
            x is self.given[n] and x._version == self.versions[n] for n, x in given.items()
        )  # fmt: skip
