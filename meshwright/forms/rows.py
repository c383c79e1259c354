"""Rows of gradients that are not all zero on some replica: which they are, and those alone. Rows
are those of the first dim, or blocks of so many values, whatever the shape."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Row, Send
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
            Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=1,
                 share="rows"),
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
    say (`_coded`). Marks go while the backward goes on. Parameters without rows go whole, and so do
    values that are left beside blocks."""

    def __init__(self, slots: Sequence[Slot], lines: Lines, block: int = 0) -> None:
        """`block`: values of a row; 0: those of the first dim."""
        self._lines, self._slots, self._block = lines, trainable(slots), block
        self.held = held_whole(slots, lines)
        self._marks: dict[int, tuple[Tensor, Waitable]] = {}

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for slot in self._slots:
            slot.whole.grad = None

    def after_backward(self, call: int, last: bool) -> None:
        for index, slot in enumerate(self._slots):
            if last and slot.owner == call and has_rows(slot.whole, self._block):
                self._mark(index)

    def _mark(self, index: int) -> None:
        """Starts to tell all replicas which rows of a gradient have anything here."""
        marks = self._rows(self._sent(index))[0].any(dim=1)
        together = dist.get_backend(self._lines.replicas.group) == "gloo"
        # NCCL has no OR; sums of bytes would overflow among 256 replicas.
        bits = packed_bits(marks) if together else marks.to(torch.uint8)
        op = dist.ReduceOp.BOR if together else dist.ReduceOp.MAX
        self._marks[index] = bits, self._start(bits, op)

    def finish(self) -> None:
        for index, slot in enumerate(self._slots):
            if has_rows(slot.whole, self._block) and index not in self._marks:
                self._mark(index)
        works: list[tuple[int, Tensor | None, Tensor, Waitable]] = []
        for index, slot in enumerate(self._slots):
            if not has_rows(slot.whole, self._block):
                gradient = self._sent(index)
                works.append((index, None, gradient, self._start(gradient)))
                continue
            bits, work = self._marks.pop(index)
            work.wait()
            rows, left = self._rows(self._sent(index))
            count = len(rows)
            marks = unpacked_bits(bits, count) if bits.numel() != count else bits.bool()
            union = marks.nonzero().flatten()
            sent = torch.cat((self._coded(index, rows, union).flatten(), left))
            works.append((index, union, sent, self._start(sent)))
        for index, found, sent, work in works:
            work.wait()
            self._arrived(index, found, sent)

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a tensor: [rows, values of a row], and what is left."""
        flat = x.view(-1)
        width = self._block or max(1, flat.numel() // max(1, x.shape[0]))
        used = flat.numel() // width * width
        return flat[:used].view(-1, width), flat[used:]

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
            x.grad = torch.zeros_like(x, requires_grad=False, memory_format=torch.contiguous_format)
        elif not x.grad.is_contiguous():
            x.grad = x.grad.contiguous()
        return x.grad

    def _coded(self, index: int, rows: Tensor, union: Tensor) -> Tensor:
        """What is summed over replicas, of the rows that any of them has."""
        return rows.index_select(0, union)

    def _arrived(self, index: int, union: Tensor | None, found: Tensor) -> None:
        """The sum over replicas of a parameter has come."""
        if union is not None:  # of other rows there is nothing on any replica
            rows, left = self._rows(self._sent(index))
            values, rest = torch.split(found, [found.numel() - left.numel(), left.numel()])
            rows.index_copy_(0, union, self._decoded(index, values).view(-1, rows.shape[1]))
            left.copy_(rest)

    def _decoded(self, index: int, values: Tensor) -> Tensor:
        """The rows of which the sum over replicas has come, from what `_coded` made of them."""
        return values


def torn_rows(form: str, path: str) -> Finding:
    """Says that a form needs the rows of a table whole on a rank."""
    message = f"{form} takes tables whose rows are not split over model axes, and {path} is none"
    return Finding("sync", message, f"no sync for {path}")


def has_rows(x: Tensor, block: int = 0) -> bool:
    """Tells whether a parameter has rows, those of one value, too; or a block of so many values."""
    return x.numel() >= block > 0 or (not block and x.ndim > 1)


def packed_bits(marks: Tensor) -> Tensor:
    """Returns [n] booleans as [ceil(n / 8)] bytes, the first in the lowest bit."""
    padded = marks.new_zeros(-(-marks.numel() // _BITS) * _BITS)
    padded[: marks.numel()] = marks
    weights = 1 << torch.arange(_BITS, device=marks.device, dtype=torch.uint8)
    return (padded.view(torch.uint8).view(-1, _BITS) * weights).sum(dim=1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor, count: int) -> Tensor:
    """Returns the first `count` booleans of `packed_bits`."""
    shifts = torch.arange(_BITS, device=packed.device, dtype=torch.uint8)
    return (packed[:, None] >> shifts & 1).flatten()[:count].bool()
