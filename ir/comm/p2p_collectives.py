"""Gathers and reduce-scatters on CPUs, each part sent straight to the rank that needs it.

PyTorch's own for Gloo work on a copy of the whole value that nobody sees, made by whichever thread
does the work, and its reduce-scatter is an all-reduce of the whole: twice the bytes. Measured with
2 and 4 processes of one machine (benchmarks/direct.py): 0.4 to 0.8 of their time up to 4 MiB, 0.4
to 0.5 at 32 MiB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 0x6D77
"""Of these messages alone: those of pipelines and rings have others."""
_TURNS = 1 << 14
"""More sums than are ever on their way at once."""
_turns: dict[str, int] = {}
"""Group -> sums begun so far whose summands are received late; equal on its ranks."""


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> object:
        """Until it is done."""


@dataclass(frozen=True, eq=False)
class _Gathering:
    messages: Sequence[Waitable]

    def wait(self) -> None:
        for message in self.messages:
            message.wait()


@dataclass(frozen=True, eq=False)
class _Summing:
    messages: Sequence[Waitable]
    parts: Sequence[Tensor]
    """Of all ranks, in their order, once the messages are here."""
    result: Tensor

    def wait(self) -> None:
        for message in self.messages:
            message.wait()
        first, *others = self.parts
        self.result.copy_(first)
        for part in others:
            self.result.add_(part)


def gather(result: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> Waitable:
    """Flat: starts to fill `result` with every rank's `part`, in the order of the ranks."""
    group = _given(group)
    rank, rows = group.rank(), result.view(group.size(), -1)
    peers = _peers(group)
    messages = [
        *(group.recv([rows[peer]], peer, _TAG) for peer in reversed(peers)),
        *(group.send([part], peer, _TAG) for peer in peers),
    ]
    rows[rank].copy_(part)
    return _Gathering(messages)


def reduce_scatter(result: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> Waitable:
    """Flat: starts to sum this rank's part of every rank's `whole`, in the order of the ranks.

    The parts of the others are there beside it until it has been waited for.
    """
    group = _given(group)
    rank, rows = group.rank(), whole.view(group.size(), -1)
    peers, received = _peers(group), whole.new_empty((group.size() - 1, rows.shape[1]))
    parts = [*received[:rank], rows[rank], *received[rank:]]
    messages = [
        *(group.recv([parts[peer]], peer, _TAG) for peer in reversed(peers)),
        *(group.send([rows[peer]], peer, _TAG) for peer in peers),
    ]
    return _Summing(messages, parts, result)


def gather_uneven(
    result: Tensor, part: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> Waitable:
    """Flat: as `gather`, where ranks have parts of different `sizes`, some of none."""
    group = _given(group)
    rank, parts = group.rank(), torch.split(result, list(sizes))
    peers = _peers(group)
    messages = [
        *(group.recv([parts[peer]], peer, _TAG) for peer in reversed(peers) if sizes[peer]),
        *(group.send([part], peer, _TAG) for peer in peers if sizes[rank]),
    ]
    parts[rank].copy_(part)
    return _Gathering(messages)


@dataclass(frozen=True, eq=False)
class _SummingOne:
    """A part of the sum, whose summands come one after the other, in the order of the ranks."""

    sent: Sequence[Waitable]
    own: Tensor
    result: Tensor
    group: dist.ProcessGroup
    tag: int

    def wait(self) -> None:
        rank, came = self.group.rank(), torch.empty_like(self.result)
        for peer in range(self.group.size()) if self.result.numel() else ():
            if peer != rank:
                self.group.recv([came], peer, self.tag).wait()
            found = self.own if peer == rank else came
            self.result.add_(found) if peer else self.result.copy_(found)
        for message in self.sent:
            message.wait()


def reduce_scatter_uneven(
    result: Tensor, whole: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None
) -> Waitable:
    """Flat: as `reduce_scatter`, where ranks get parts of different `sizes`, some none.

    Of the parts of the others one is there at a time, while it is waited for: one rank may get all,
    and room for everybody's would be as much again for each.
    """
    group = _given(group)
    parts, tag = torch.split(whole, list(sizes)), _next_tag(group)
    sent = [group.send([parts[peer]], peer, tag) for peer in _peers(group) if sizes[peer]]
    return _SummingOne(sent, parts[group.rank()], result, group, tag)


def _next_tag(group: dist.ProcessGroup) -> int:
    """Who receives late may do so in another order than others send: each sum has its own tag."""
    turn = _turns[group.group_name] = (_turns.get(group.group_name, 0) + 1) % _TURNS
    return _TAG + 1 + turn


def _given(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    assert found is not None
    return found


def _peers(group: dist.ProcessGroup) -> list[int]:
    """The others, the next one first, so that not all begin with the same."""
    size, rank = group.size(), group.rank()
    return [(rank + step) % size for step in range(1, size)]
