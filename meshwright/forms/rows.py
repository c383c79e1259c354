"""Rows of gradients that are not all zero on some replica: which they are, and those alone."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Event, Exchange, Hold, Rewrite, Row, Send
from meshwright.forms.flat import held_whole, trainable
from meshwright.forms.running import Lines, Samples, Slot, SyncRun
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.finding import Finding

_BITS = 8


def exchange_of_rows(share: float, *more: Row) -> Exchange:
    """Returns what a form does that sums rows that any replica has, so large a share of the whole,
    and holds `more`."""
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=1),
            # Rows are looked for in the whole gradient.
            Rewrite(what="gradients", unit="bucket", at=Event.UPDATED, moved=1.0),
            Send(what="gradients", primitive=Primitive.ALL_REDUCE, axis="dp", unit="bucket",
                 at=Event.END, until=Event.END, share="rows"),
            *more,
        ),
        stated={"rows": share},
    )  # fmt: skip


class MarkedRows(SyncRun):
    """Which rows of each gradient have anything, on any replica; what goes of them is for a form to
    say (`_reduce`). Marks go while the backward goes on. Parameters without rows go whole."""

    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        self._lines, self._slots = lines, trainable(slots)
        self.held = held_whole(slots, lines)
        self._marks: dict[int, tuple[Tensor, Waitable]] = {}

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for slot in self._slots:
            slot.whole.grad = None

    def after_backward(self, call: int, last: bool) -> None:
        for index, slot in enumerate(self._slots):
            if last and slot.owner == call and has_rows(slot.whole):
                self._mark(index)

    def _mark(self, index: int) -> None:
        """Starts to tell all replicas which rows of a gradient have anything here."""
        gradient = self._sent(index)
        marks = gradient.reshape(gradient.shape[0], -1).ne(0).any(dim=1)
        together = dist.get_backend(self._lines.replicas.group) == "gloo"
        # NCCL has no OR; sums of bytes would overflow among 256 replicas.
        bits = packed_bits(marks) if together else marks.to(torch.uint8)
        op = dist.ReduceOp.BOR if together else dist.ReduceOp.MAX
        self._marks[index] = bits, self._start(bits, op)

    def finish(self) -> None:
        for index, slot in enumerate(self._slots):
            if has_rows(slot.whole) and index not in self._marks:
                self._mark(index)
        works: list[tuple[int, Tensor | None, Tensor, Waitable]] = []
        for index, slot in enumerate(self._slots):
            if not has_rows(slot.whole):
                gradient = self._sent(index)
                works.append((index, None, gradient, self._start(gradient)))
                continue
            bits, work = self._marks.pop(index)
            work.wait()
            rows = slot.whole.shape[0]
            marks = unpacked_bits(bits, rows) if bits.numel() != rows else bits.bool()
            union = marks.nonzero().flatten()
            sent = self._coded(index, self._sent(index), union)
            works.append((index, union, sent, self._start(sent)))
        for index, found, sent, work in works:
            work.wait()
            self._arrived(index, found, sent)

    def _start(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Waitable:
        peers = self._lines.replicas
        what = What("gradients", self._lines.stage, peers.axis, "all_reduce", x.nbytes, peers.size)
        start = self._lines.recorder.mark()
        work = dist.all_reduce(x, op=op, group=peers.group, async_op=True)
        assert work is not None
        return self._lines.recorder.pending(what, work, start)

    def _sent(self, index: int) -> Tensor:
        """What this replica has of a gradient."""
        x = self._slots[index].whole
        if x.grad is None:
            x.grad = torch.zeros_like(x, requires_grad=False)
        return x.grad

    def _coded(self, index: int, gradient: Tensor, union: Tensor) -> Tensor:
        """What is summed over replicas, of the rows that any of them has."""
        return gradient.index_select(0, union)

    def _arrived(self, index: int, union: Tensor | None, found: Tensor) -> None:
        """The sum over replicas of a parameter has come."""
        if union is not None:  # of other rows there is nothing on any replica
            self._sent(index).index_copy_(0, union, found)


def torn_rows(form: str, path: str) -> Finding:
    """Says that a form needs the rows of a table whole on a rank."""
    message = f"{form} takes tables whose rows are not split over model axes, and {path} is none"
    return Finding("sync", message, f"no sync for {path}")


def has_rows(x: Tensor) -> bool:
    """Tells whether a parameter has rows; those of one value, too."""
    return x.ndim > 1


def packed_bits(marks: Tensor) -> Tensor:
    """Returns [n] booleans as [ceil(n / 8)] bytes, the first in the lowest bit."""
    padded = marks.new_zeros(-(-marks.numel() // _BITS) * _BITS)
    padded[: marks.numel()] = marks
    weights = 2 ** torch.arange(_BITS, device=marks.device, dtype=torch.int32)
    return (padded.view(-1, _BITS).int() * weights).sum(dim=1).to(torch.uint8)


def unpacked_bits(packed: Tensor, count: int) -> Tensor:
    """Returns the first `count` booleans of `packed_bits`."""
    shifts = torch.arange(_BITS, device=packed.device, dtype=torch.uint8)
    return (packed[:, None] >> shifts & 1).flatten()[:count].bool()
