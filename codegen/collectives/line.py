"""One line of ranks along a mesh axis, and the few messages that everything is built from."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir import torch_private
from meshwright.ir.comm.p2p_collectives import Waitable

TRAVEL = "travel"
"""The method of `Comm` by which rows go to ranks that the data names."""
Narrow = Literal["", "rows", "gradients"]
"""What goes in 8-bit floats (`ir.graph.narrow_tokens`): rows on their way there, gradients on
theirs back, or neither."""


class TradedRows(NamedTuple):
    """How many rows a rank sends to each other of a line, and gets from it."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def back(self) -> "TradedRows":
        """Returns those of what goes the other way."""
        return TradedRows(self.received, self.sent)


class Line(Protocol):
    """The ranks that differ only in one axis. Arguments are not changed."""

    size: int
    rank: int

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """Sum (or maximum) over the ranks."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, stacked along a new dim 0. Shapes are equal on all ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over the ranks of x[rank]."""
        ...

    def all_to_all(self, parts: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Part i goes to rank i; what comes from rank i has shape i."""
        ...

    def shift(self, x: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        """Starts to send x to the next rank, the last one's to the first; what it returns waits for
        what the rank before sends, which has this shape."""
        ...

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to sum over the ranks; what it returns waits for the sum. Likewise those below.
        Nobody may change x meanwhile."""
        ...

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]: ...
    def begin_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]: ...
    def begin_rows(self, x: Tensor, counts: TradedRows) -> Callable[[], Tensor]:
        """Starts to send rows of x, in order of the ranks that they go to; what it returns waits
        for those that come, in order of the ranks that they come from."""
        ...


def on_wire(x: Tensor) -> Tensor:
    """The same memory as reals: backends do not know complex numbers."""
    return torch.view_as_real(x) if x.is_complex() else x


def settled(x: Tensor) -> Tensor:
    """x as its memory says it: a conjugate may be a view that only says so, and so a negative."""
    return x.resolve_conj().resolve_neg()


class AtOnce:
    """Begins nothing that is not over at once."""

    def begin_all_reduce(self: Line, x: Tensor) -> Callable[[], Tensor]:
        result = self.all_reduce(x)
        return lambda: result

    def begin_all_gather(self: Line, x: Tensor) -> Callable[[], Tensor]:
        result = self.all_gather(x)
        return lambda: result

    def begin_reduce_scatter(self: Line, x: Tensor) -> Callable[[], Tensor]:
        result = self.reduce_scatter(x)
        return lambda: result

    def begin_rows(self: Line, x: Tensor, counts: TradedRows) -> Callable[[], Tensor]:
        parts = list(torch.split_with_sizes(x, counts.sent))
        came = self.all_to_all(parts, [(count, *x.shape[1:]) for count in counts.received])
        result = torch.cat(came)
        return lambda: result


class Alone(AtOnce):
    """The line of an axis of size 1."""

    size = 1
    rank = 0

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def all_to_all(self, parts: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        return parts

    def shift(self, x: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: x


class GroupLine:
    """A line that is a torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(on_wire(result), op=operation, group=self.group)
        return result

    def all_gather(self, x: Tensor) -> Tensor:
        result = x.new_empty((self.size, *x.shape))
        torch_private.all_gather(_flat(result), _flat(x), self.group)
        return result

    def reduce_scatter(self, x: Tensor) -> Tensor:
        result = x.new_empty(x.shape[1:])
        torch_private.reduce_scatter(_flat(result), _flat(x), self.group).wait()
        return result

    def all_to_all(self, parts: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        sent = torch.cat([part.reshape(-1) for part in parts])
        counts = [torch.Size(shape).numel() for shape in shapes]
        result, each = sent.new_empty(sum(counts)), 2 if sent.is_complex() else 1
        dist.all_to_all_single(
            _flat(result), _flat(sent), [n * each for n in counts],
            [part.numel() * each for part in parts], group=self.group,
        )  # fmt: skip
        return [
            x.view(shape)
            for x, shape in zip(torch.split_with_sizes(result, counts), shapes, strict=True)
        ]

    def shift(self, x: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        mine, received = x.contiguous(), x.new_empty(shape)
        send = dist.P2POp(dist.isend, on_wire(mine), group=self.group, group_peer=following)
        receive = dist.P2POp(dist.irecv, on_wire(received), group=self.group, group_peer=before)
        works = dist.batch_isend_irecv([send, receive])

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def begin_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        result = x.clone(memory_format=torch.contiguous_format)
        return _result(result, dist.all_reduce(on_wire(result), group=self.group, async_op=True))

    def begin_all_gather(self, x: Tensor) -> Callable[[], Tensor]:
        result = x.new_empty((self.size, *x.shape))
        started = torch_private.start_all_gather(_flat(result), _flat(x), self.group)
        return _result(result, started)

    def begin_reduce_scatter(self, x: Tensor) -> Callable[[], Tensor]:
        result = x.new_empty(x.shape[1:])
        started = torch_private.reduce_scatter(_flat(result), _flat(x), self.group)
        return _result(result, started)

    def begin_rows(self, x: Tensor, counts: TradedRows) -> Callable[[], Tensor]:
        sent, result = x.contiguous(), x.new_empty(sum(counts.received), *x.shape[1:])
        work = dist.all_to_all_single(
            on_wire(result), on_wire(sent), list(counts.received), list(counts.sent),
            group=self.group, async_op=True,
        )  # fmt: skip

        def wait(_: Tensor = sent) -> Tensor:
            """Wait with what is sent held until then."""
            work.wait()
            return result

        return wait


def _flat(x: Tensor) -> Tensor:
    return on_wire(x.contiguous()).view(-1)


def _result(result: Tensor, work: Waitable | None) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        assert work is not None
        work.wait()
        return result

    return wait
