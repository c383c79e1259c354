"""Memory of a line's ranks that each of them can read and write, where there is such memory.

That is on GPUs of one host that see each other. A workspace has two halves that calls take by
turns: a rank writes into a half again only after a barrier, or after signals, that every peer sends
once it has read what was there. Signals hold the number of the call that they are from.
"""

import socket
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.codegen.collectives.line import GroupLine, Line
from meshwright.ir import torch_private
from meshwright.ir.comm.by_store import meet, of_all
from meshwright.ir.launch import triton
from meshwright.ir.placed.peers import MOST_RANKS

_ALIGNED = 256
_SIGNALS = 4 * MOST_RANKS


@dataclass(frozen=True, slots=True)
class Turn:
    """One half of a workspace, for one call."""

    handle: Any
    own: Tensor
    """Bytes of this rank."""
    peers: Tensor
    """Where the bytes of each rank begin."""
    signals: Tensor
    """Of this rank, one per peer."""
    peer_signals: Tensor
    """Where those of each rank begin."""
    epoch: int
    """Number of the call."""

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first of the bytes as such a tensor."""
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.own[:count].view(dtype).view(shape)

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The same of a peer."""
        at = self.own.storage_offset() // dtype.itemsize
        found: Tensor = self.handle.get_buffer(rank, shape, dtype, at)
        return found

    def barrier(self) -> None:
        """On the stream: what all ranks have written before it is there after it."""
        self.handle.barrier()


class Workspace:
    """What the ranks of a group share; grows as calls need it, on all ranks alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.epoch, self.half = group, device, 0, 0
        self.brings: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """For copies from peers beside what computes."""

    def turn(self, nbytes: int) -> Turn:
        if nbytes > self.half:
            self._make(nbytes)
        self.epoch += 1
        half = self.epoch % 2
        own = self.buffer[half * self.half : (half + 1) * self.half]
        return Turn(self.handle, own, self.halves[half], self.signals, self.halves[2], self.epoch)

    def bring(self, turn: Turn, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """All ranks' x, which comes while others compute, and a signal for each that has come."""
        ranks, main = len(turn.peers), torch.cuda.current_stream(x.device)
        parts = x.new_empty(ranks, *x.shape)
        signals = torch.zeros(ranks, dtype=torch.uint32, device=x.device)
        turn.view(tuple(x.shape), x.dtype).copy_(x)
        parts[rank].copy_(x)
        torch_private.write_signal(signals, rank)
        turn.barrier()
        self.brings.wait_stream(main)
        # The copies are under way before the product is, which takes all processors and waits.
        with torch.cuda.stream(self.brings):
            for step in range(1, ranks):
                other = (rank + step) % ranks
                parts[other].copy_(turn.of(other, tuple(x.shape), x.dtype))
                torch_private.write_signal(signals, other)
        return parts, signals.view(torch.int32)

    def brought(self) -> None:
        """What comes after on the stream comes after the copies."""
        torch.cuda.current_stream(self.device).wait_stream(self.brings)

    def _make(self, nbytes: int) -> None:
        # Whoever still reads the old memory is waited for: it goes back when it is replaced.
        torch.cuda.synchronize(self.device)
        meet(self.group)
        self.half = -(-nbytes // _ALIGNED) * _ALIGNED
        size = 2 * self.half + _SIGNALS
        self.buffer, self.handle = torch_private.symmetric(size, self.device, self.group)
        self.buffer.zero_()
        self.signals = self.buffer[2 * self.half :].view(torch.int32)[: self.group.size()]
        bases = torch.tensor(self.handle.buffer_ptrs, dtype=torch.int64, device=self.device)
        self.halves = [bases + at * self.half for at in range(3)]
        """Where on each rank the halves and the signals begin."""
        self.handle.barrier()


_WORKSPACES: WeakKeyDictionary[dist.ProcessGroup, Workspace | str] = WeakKeyDictionary()


def workspace(line: Line, x: Tensor) -> Workspace | str:
    """What the line's ranks share, if kernels on x can use it, or why not; the same on all."""
    if triton is None:
        return "Triton is not installed"
    if not x.is_cuda:
        return f"tensors are on {x.device.type}"
    if not isinstance(line, GroupLine):
        return "the ranks are no process group"
    if not 1 < line.size <= MOST_RANKS:
        return f"{line.size} ranks share no memory: 2 to {MOST_RANKS} do"
    if line.group not in _WORKSPACES:
        _WORKSPACES[line.group] = _far(line, x) or Workspace(line.group, x.device)
    return _WORKSPACES[line.group]


def _far(line: GroupLine, x: Tensor) -> str:
    """ "" if all ranks are on one host, and each device reads the others' memory; else why not."""
    everyone = of_all((socket.gethostname(), x.device.index), line.group)
    others = {index for _, index in everyone} - {x.device.index}
    able = all(torch.cuda.can_device_access_peer(x.device.index, index) for index in others)
    answers = of_all(able, line.group)
    if len({host for host, _ in everyone}) > 1:
        return "the ranks are on several hosts"
    return "" if all(answers) else "a device does not see another's memory"
