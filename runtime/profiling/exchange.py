"""One collective or message of a group, with fresh buffers and the calls that the runtime makes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.torch_private import reduce_scatter, start_all_gather

_ITEM = torch.float32.itemsize


class RepeatedExchange:
    """Runs one operation again and again. `group` is None on ranks that only look on."""

    def __init__(
        self, operation: str, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self.operation, self.group, self.device = operation, group, device
        self._numel = 0
        self._sent = self._got = torch.empty(0)
        self._arriving: Waitable | None = None

    def prepare(self, nbytes: int) -> None:
        """The size of what follows: of the whole value, or of the message."""
        assert self.group is not None
        size = self.group.size()
        self._numel = max(size * size, nbytes // _ITEM // (size * size) * size * size)

    def fill(self) -> None:
        """Buffers as the runtime has them: the operand just written, the result just allocated."""
        assert self.group is not None
        size = self.group.size()
        part = self._numel // size
        # Freed first, so that the same memory may serve again, as it does in training.
        self._sent = self._got = torch.empty(0)
        match self.operation:
            case "all_reduce" | "broadcast" | "send":
                self._sent = self._ones(self._numel)
            case "all_gather":
                self._sent, self._got = self._ones(part), self._room(self._numel)
            case "reduce_scatter":
                self._sent, self._got = self._ones(self._numel), self._room(part)
            case "all_to_all":
                self._sent, self._got = self._ones(part), self._room(part)
        if self.waits:
            # Receives are posted ahead.
            self._arriving = dist.irecv(self._sent, self._peer(0), group=self.group)

    def run(self) -> None:
        """The operation, to its end."""
        self.start().wait()

    def start(self) -> Waitable:
        """The operation, under way."""
        starts: dict[str, Callable[[], Waitable | None]] = {
            "all_reduce": lambda: dist.all_reduce(self._sent, group=self.group, async_op=True),
            "all_gather": lambda: start_all_gather(self._got, self._sent, self.group),
            "reduce_scatter": lambda: reduce_scatter(self._got, self._sent, self.group),
            "all_to_all": self._all_to_all,
            "broadcast": lambda: dist.broadcast(
                self._sent, self._peer(0), group=self.group, async_op=True
            ),
            "send": self._message,
        }
        work = starts[self.operation]()
        assert work is not None
        return work

    def _all_to_all(self) -> Waitable | None:
        work: Waitable | None = dist.all_to_all_single(
            self._got, self._sent, group=self.group, async_op=True
        )
        return work

    def _message(self) -> Waitable | None:
        if self.waits:
            return self._arriving
        return dist.isend(self._sent, self._peer(1), group=self.group)

    @property
    def waits(self) -> bool:
        """Whether this rank receives a message: it has nothing else to do, so it comes first."""
        assert self.group is not None
        return self.operation == "send" and self.group.rank() == 1

    def _peer(self, index: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, index)

    def _ones(self, numel: int) -> Tensor:
        return torch.ones(numel, device=self.device)

    def _room(self, numel: int) -> Tensor:
        return torch.empty(numel, device=self.device)
