"""Rows of which a replica has a gradient, gathered from all: what DDP does with sparse gradients.

Each replica sends its rows and their numbers to all others, and adds up what has come, replica
after replica in the order of ranks, so that all have the same sums to the last bit. Nothing is
agreed on first but how many there are. It sends least among few replicas, or where they have few
rows in common; `packed_rows` sends those once that several have.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Send
from meshwright.forms.flat import held_whole, trainable
from meshwright.forms.rows import has_rows
from meshwright.forms.running import Lines, ParameterStore, Samples, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, wrong_settings
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage
from meshwright.ir.torch_private import start_all_gather

EXACT = True
SEARCHED = False
"""By searches for whole stages: it is for single parameters."""
TABLES = ("rows_each", "row_bytes")
"""Searches try it on embedding tables, with these facts of them as settings."""
_SETTINGS: Known = {"rows_each": Number(1.0, 1e-9, 1.0), "row_bytes": Number(256, 1, 2**40)}
"""Share of rows of which one replica has a gradient; bytes of a row."""
_ID_BYTES = 8
_NONE = 1e-12
"""Share of a gradient that the message of how many rows there are is as long as: it has its latency
only."""


def describe(
    replicas: int, zero: int = 0, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is held and sent: every replica's rows, each with its number."""
    told = FormSettings(_SETTINGS, settings)
    each = told.number("rows_each") * (1 + _ID_BYTES / told.whole("row_bytes"))
    return Exchange(
        (
            Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
            Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=1,
                 share="gathered"),
            # Rows are looked for in the whole gradient.
            Rewrite(what="gradients", unit="bucket", at=Event.UPDATED, moved=1.0),
            *(Send(what="gradients", primitive=Primitive.ALL_GATHER, axis="dp", unit="bucket",
                   at=Event.END, until=Event.END, share=share, by_rank=True)
              for share in ("counts", "rows")),
        ),
        stated={"counts": _NONE, "rows": each, "gathered": replicas * each},
    )  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    said = stage.sync.settings if stage.sync else {}
    yield from wrong_settings("gathered_rows", _SETTINGS, said)
    if stage.zero:
        yield f"zero {stage.zero} splits rows over ranks; gathered_rows has them whole", "zero 0"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    return _Gathered(slots, lines)


class _Gathered(SyncRun):
    """Parameters without rows are summed whole."""

    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        self._lines, self._slots = lines, trainable(slots)
        self.held = held_whole(slots, lines)
        self._told: dict[int, tuple[Tensor, Tensor, Waitable]] = {}
        """Of a parameter in this step: its rows here; how many each replica has."""

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for slot in self._slots:
            slot.whole.grad = None

    def after_backward(self, call: int, last: bool) -> None:
        for index, slot in enumerate(self._slots):
            if last and slot.owner == call and has_rows(slot.whole):
                self._tell(index)

    def _tell(self, index: int) -> None:
        """Starts to tell all replicas how many rows of a gradient there are here."""
        x = self._gradient(index)
        rows = x.reshape(x.shape[0], -1).any(dim=1).nonzero().flatten()
        mine = torch.tensor([len(rows)], device=x.device)
        counts = mine.new_empty(self._lines.replicas.size)
        self._told[index] = rows, counts, self._gather(counts, mine)

    def finish(self) -> None:
        arriving: list[tuple[int, list[int], Tensor, Waitable]] = []
        for index, slot in enumerate(self._slots):
            if not has_rows(slot.whole):
                gradient = self._gradient(index)
                arriving.append((index, [], gradient, self._sum(gradient)))
                continue
            if index not in self._told:
                self._tell(index)
            rows, each, work = self._told.pop(index)
            work.wait()
            counts: list[int] = each.tolist()
            own = self._packed(self._gradient(index), rows, max(counts))
            found = own.new_empty((len(counts), *own.shape))
            arriving.append((index, counts, found, self._gather(found, own)))
        for index, counts, found, work in arriving:
            work.wait()
            if has_rows(self._slots[index].whole):
                self._add_up(self._gradient(index), counts, found)

    def _gradient(self, index: int) -> Tensor:
        """What this replica has of a gradient."""
        x = self._slots[index].whole
        if x.grad is None:
            x.grad = torch.zeros_like(x, requires_grad=False)
        return x.grad

    @staticmethod
    def _packed(gradient: Tensor, rows: Tensor, most: int) -> Tensor:
        """Rows, each behind its number, as bytes: [most, bytes of both]; the last ones are no rows
        where another replica has more."""
        values = gradient.index_select(0, rows).reshape(len(rows), -1)
        own = torch.cat([rows[:, None].view(torch.uint8), values.view(torch.uint8)], dim=1)
        return torch.cat([own, own.new_zeros((most - len(rows), own.shape[1]))])

    @staticmethod
    def _add_up(gradient: Tensor, counts: Sequence[int], found: Tensor) -> None:
        """The gradient becomes the sum of what all replicas have sent."""
        gradient.zero_()
        for count, packed in zip(counts, found, strict=True):
            rows = packed[:count, :_ID_BYTES].contiguous().view(torch.int64).flatten()
            values = packed[:count, _ID_BYTES:].contiguous().view(gradient.dtype)
            gradient.index_add_(0, rows, values.view(count, *gradient.shape[1:]))

    def _gather(self, result: Tensor, part: Tensor) -> Waitable:
        what = self._what("all_gather", result.nbytes)
        start = self._lines.recorder.mark()
        work = start_all_gather(result.flatten(), part.flatten(), self._lines.replicas.group)
        return self._lines.recorder.pending(what, work, start)

    def _sum(self, x: Tensor) -> Waitable:
        what = self._what("all_reduce", x.nbytes)
        start = self._lines.recorder.mark()
        work = dist.all_reduce(x, group=self._lines.replicas.group, async_op=True)
        assert work is not None
        return self._lines.recorder.pending(what, work, start)

    def _what(self, primitive: str, nbytes: int) -> What:
        peers = self._lines.replicas
        return What("gradients", self._lines.stage, peers.axis, primitive, nbytes, peers.size)
