"""Parts of several tensors to each rank, all of a dtype in one message."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.running import Lines, Peers
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.profile.measured import Purpose

Shapes = Sequence[tuple[int, ...]]
"""Of what comes from each rank."""


@dataclass(frozen=True, eq=False)
class _Message:
    """Parts of one dtype that are on their way."""

    tensors: list[int]
    came: Tensor
    shapes: list[Shapes]
    """Of the parts of each tensor."""
    sent: Tensor
    work: Waitable | None

    def values(self) -> list[list[Tensor]]:
        """Waits; of each tensor the parts that came, rank after rank."""
        if self.work is not None:
            self.work.wait()
        order = [shape for of in zip(*self.shapes, strict=True) for shape in of]
        flat = torch.split(self.came, [prod(shape) for shape in order])
        parts = [x.view(shape) for x, shape in zip(flat, order, strict=True)]
        return [parts[number :: len(self.shapes)] for number in range(len(self.shapes))]


@dataclass(frozen=True, eq=False)
class _Own:
    """Parts that a rank without others has sent to itself."""

    tensors: list[int]
    parts: Sequence[Sequence[Tensor]]

    @property
    def came(self) -> Tensor:
        return self.parts[0][0]

    sent = came

    def values(self) -> list[list[Tensor]]:
        """As they were."""
        return [list(of) for of in self.parts]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns parts one after the other; one alone as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Arriving:
    """Parts of several tensors that are on their way."""

    def __init__(self, messages: Sequence[_Message | _Own]) -> None:
        self._messages = tuple(messages)

    @property
    def kept(self) -> list[Tensor]:
        """What must stay until they have arrived."""
        return [x for message in self._messages for x in (message.came, message.sent)]

    def values(self) -> list[list[Tensor]]:
        """Waits; of each tensor the parts that came, rank after rank."""
        found = {
            number: parts for message in self._messages
            for number, parts in zip(message.tensors, message.values(), strict=True)
        }  # fmt: skip
        return [found[number] for number in sorted(found)]


def start_parts(
    lines: Lines,
    parts: Sequence[Sequence[Tensor]],
    shapes: Sequence[Shapes],
    purpose: Purpose,
    peers: Peers | None = None,
) -> Arriving:
    """Sends parts of each tensor, one to each of `peers` (the ranks of dp_shard if None), which
    must not be written before they have arrived; `shapes`: of those that come."""
    peers = peers or lines.shards
    if peers.group is None:
        return Arriving([_Own(list(range(len(parts))), parts)] if parts else [])
    messages = []
    for dtype in dict.fromkeys(of[0].dtype for of in parts):
        own = [index for index, of in enumerate(parts) if of[0].dtype == dtype]
        into = [shapes[index] for index in own]
        sent = [parts[index] for index in own]
        messages.append(_message(lines, peers, own, sent, into, purpose))
    return Arriving(messages)


def _message(
    lines: Lines,
    peers: Peers,
    tensors: list[int],
    parts: Sequence[Sequence[Tensor]],
    shapes: list[Shapes],
    purpose: Purpose,
) -> _Message:
    """One message to each rank: its part of each tensor, one after the other."""
    by_rank = list(zip(*parts, strict=True))
    flat = torch.cat([x.reshape(-1) for to in by_rank for x in to])
    goes = [sum(x.numel() for x in to) for to in by_rank]
    comes = [sum(map(prod, of)) for of in zip(*shapes, strict=True)]
    came = flat.new_empty(sum(comes))
    what = What(purpose, lines.stage, peers.axis, "all_to_all", flat.nbytes, peers.size)
    start = lines.recorder.mark()
    work = dist.all_to_all_single(came, flat, comes, goes, group=peers.group, async_op=True)
    assert work is not None
    pending = lines.recorder.pending(what, work, start)
    return _Message(tensors, came, shapes, flat, pending)
