"""PowerSGD: gradients of matrices as products of two thin ones (Vogels et al. 2019).

A gradient M [rows, columns] is multiplied by columns Q [columns, rank] of the step before, made
orthonormal. Replicas sum P = MQ, make that orthonormal, and sum Q = M'P; all take PQ' for the sum
of their gradients. Each keeps what it lost of its own and adds it to its next gradient. Vectors go
whole, with P, and so do matrices of which thin ones have not `gain` times fewer values.

Where replicas have unequal shares of the batch, each has lost what it had less its share of PQ'.
Gradients are clipped after this, and what was lost is not, as under torch's hook. Replicas must
compute alike, on equal devices: all make the same P orthonormal. What was lost is in units of its
step's gradient, also where gradients are scaled later by numbers that differ from step to step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, Rewrite, Row, Send, Shaped
from meshwright.forms.flat import BUCKET_BYTES, buckets, held_whole, trainable
from meshwright.forms.running import Lines, ParameterStore, Samples, Slot, SyncRun, SyncState
from meshwright.forms.settings import FormSettings, Known, Number, Word, wrong_settings
from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Setting, Stage

EXACT = False
CHANGES = "low_rank"
SHAPES = True
GIVES_UP = (
    "gradients of matrices are replaced by products of thin ones, of few columns; what is lost in "
    "one step is made up for in later ones"
)
_SETTINGS: Known = {
    "rank": Number(4, 1, 2**20), "gain": Number(2.0, 0.0, 1e6), "start": Number(0, 0, 2**40),
    "feedback": Word(("yes", "no")), "warm": Word(("yes", "no")),
}  # fmt: skip
"""Columns of thin matrices; by how much fewer values they must have; steps at first in which all
goes whole; whether what is lost is kept, and whether a step begins with the columns of the last."""
_CALLS_BEFORE, _CALLS_AFTER = 6, 10
"""Kernels for a matrix until P goes, and from then on: a factorisation takes as long as four."""


def ladder() -> tuple[Mapping[str, Setting], ...]:
    """Returns settings that are worth trying, those that change least first."""
    return tuple({"rank": rank} for rank in (16, 8, 4, 2, 1))


def describe(
    replicas: int,
    zero: int = 0,
    settings: Mapping[str, Setting] = MappingProxyType({}),
    shapes: Sequence[Shaped] = (),
) -> Exchange:
    """Returns what is sent, computed and held, once all does not go whole any more."""
    sent = {"what": "gradients", "primitive": Primitive.ALL_REDUCE, "axis": "dp", "unit": "bucket"}
    size = _Sizes.of(shapes, _How.of(settings))
    rows: list[Row] = [
        Hold(kind="optimizer", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Hold(kind="gradients", since=Event.AFTER_BACKWARD, until=Event.NEXT_BEGIN, whole=1),
        Send(at=Event.AFTER_LAST, until=Event.END, share="left", **sent),  # type: ignore[arg-type]
        _kept("left"),
    ]
    if size.right:
        work = {"what": "gradients", "unit": "bucket"}
        rows += [
            Rewrite(at=Event.AFTER_LAST, moved=size.moved_before, flops=size.flops,
                    calls=_CALLS_BEFORE * size.tensors, **work),  # type: ignore[arg-type]
            Rewrite(at=Event.END, moved=size.moved_after, flops=3 * size.flops,
                    calls=_CALLS_AFTER * size.tensors, **work),  # type: ignore[arg-type]
            Send(at=Event.END, until=Event.END, share="right", **sent),  # type: ignore[arg-type]
            _kept("right"),
        ]  # fmt: skip
        if size.lost:
            rows.append(_kept("lost"))
    shares = {"left": size.left, "right": size.right, "lost": size.lost}
    return Exchange(tuple(rows), stated={name: x for name, x in shares.items() if x})


def _kept(share: str) -> Hold:
    return Hold(kind="kept", share=share, since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1)


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_settings("powersgd", _SETTINGS, stage.sync.settings if stage.sync else {})
    if stage.zero:
        yield f"zero {stage.zero} splits rows over ranks; powersgd has them whole", "zero 0"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    shares = stage.batch_shares
    share = shares[lines.replicas.coordinate] / sum(shares)
    return _LowRank(slots, lines, _How.of(stage.sync.settings if stage.sync else {}), share)


@dataclass(frozen=True, slots=True)
class _How:
    rank: int
    gain: float
    start: int
    feedback: bool
    warm: bool

    @classmethod
    def of(cls, said: Mapping[str, Setting]) -> "_How":
        told = FormSettings(_SETTINGS, said)
        words = told.word("feedback") == "yes", told.word("warm") == "yes"
        return cls(told.whole("rank"), told.number("gain"), told.whole("start"), *words)

    def columns(self, shape: Sequence[int]) -> int:
        """Of the thin matrices; 0: it goes whole."""
        if len(shape) < 2 or not prod(shape):
            return 0
        rows, columns = shape[0], prod(shape[1:])
        rank = min(rows, columns, self.rank)
        return rank if (rows + columns) * rank * self.gain < rows * columns else 0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of some parameters, per byte of them."""

    left: float = 1.0
    """What goes first."""
    right: float = 0.0
    lost: float = 0.0
    moved_before: float = 0.0
    moved_after: float = 0.0
    flops: float = 0.0
    """Of one product with a thin matrix."""
    tensors: float = 0.0
    """Matrices, of all tensors."""

    @classmethod
    def of(cls, shapes: Sequence[Shaped], how: _How) -> "_Sizes":
        """Where nothing is known of them, all goes whole."""
        whole = sum([x.nbytes for x in shapes])
        left = right = thick = flops = tensors = 0.0
        for shape, nbytes, _ in shapes:
            if rank := how.columns(shape):
                left += rank * nbytes / prod(shape[1:])
                right += rank * nbytes / shape[0]
                thick, flops = thick + nbytes, flops + 2.0 * rank * prod(shape)
                tensors += 1
            else:
                left += nbytes
        if not right:
            return cls()
        # Before: what was lost is added, and all is read. After: it is read, replaced, and what is
        # lost is copied and lessened.
        before, after = (1 + 3 * how.feedback) * thick, (2 + 4 * how.feedback) * thick
        return cls(
            left / whole, right / whole, thick * how.feedback / whole,
            before / whole, after / whole, flops / whole, tensors / len(shapes),
        )  # fmt: skip


@dataclass(eq=False)
class _Matrix:
    """A parameter of which thin matrices go."""

    slot: Slot
    left: Tensor
    """[rows, rank]: a view of what goes first."""
    right: Tensor
    """[columns, rank]: a view of what goes then, and begins the next step."""
    lost: Tensor | None = None
    """[rows, columns]: what earlier steps did not send."""

    @property
    def gradient(self) -> Tensor:
        """[rows, columns]: as its slot has it."""
        found = _gradient(self.slot)
        return found.view(found.shape[0], -1)


class _ThinBucket:
    """Parameters that move together: what goes first, and what then, each in a flat tensor."""

    def __init__(self, slots: Sequence[Slot], how: _How) -> None:
        self.slots = slots
        self.owner = min(slot.owner for slot in slots)
        ranks = [how.columns(slot.whole.shape) for slot in slots]
        sizes = [
            rank * slot.rows if rank else slot.whole.numel()
            for slot, rank in zip(slots, ranks, strict=True)
        ]
        columns = [slot.whole.numel() // max(1, slot.rows) for slot in slots]
        like = slots[0].whole.detach()
        self.first = like.new_zeros(sum(sizes))
        self.then = like.new_zeros(sum(r * c for r, c in zip(ranks, columns, strict=True)))
        self.matrices: list[_Matrix] = []
        self.wholes: list[tuple[Slot, Tensor]] = []
        used = 0
        for slot, rank, count, part in zip(
            slots, ranks, columns, torch.split(self.first, sizes), strict=True
        ):
            if not rank:
                self.wholes.append((slot, part.view(slot.whole.shape)))
                continue
            right = self.then[used : used + rank * count].view(count, rank)
            self.matrices.append(_Matrix(slot, part.view(-1, rank), right))
            used += rank * count


class _LowRank(SyncRun):
    def __init__(self, slots: Sequence[Slot], lines: Lines, how: _How, share: float) -> None:
        self._lines, self._how, self._share = lines, how, share
        self._slots = trainable(slots)
        self.held = held_whole(slots, lines)
        shared = lines.replicas.group is not None
        groups = buckets(self._slots, BUCKET_BYTES) if shared else []
        self._buckets = [_ThinBucket(group, how) for group in groups]
        self._matrices = [m for bucket in self._buckets for m in bucket.matrices]
        self._works: dict[_ThinBucket, list[Waitable]] = {}
        self._steps = 0
        self._draw(0)

    @property
    def _thin(self) -> bool:
        return self._steps >= self._how.start

    def begin(self, batch: Samples | None = None, next_batch: Samples | None = None) -> None:
        for slot in self._slots:
            slot.whole.grad = None

    def after_backward(self, call: int, last: bool) -> None:
        """Starts with what is complete while backward goes on."""
        for bucket in self._buckets:
            if last and bucket.owner == call:
                self._start(bucket)

    @torch.no_grad()
    def _start(self, bucket: _ThinBucket) -> None:
        if not self._thin:
            self._works[bucket] = [self._sum(_gradient(slot)) for slot in bucket.slots]
            return
        for matrix in bucket.matrices:
            gradient = matrix.gradient
            if matrix.lost is not None:
                gradient += matrix.lost
            torch.mm(gradient, orthonormal(matrix.right), out=matrix.left)
        for slot, part in bucket.wholes:
            part.copy_(_gradient(slot))
        self._works[bucket] = [self._sum(bucket.first)]

    def _sum(self, x: Tensor) -> Waitable:
        """Starts to sum it over replicas."""
        peers = self._lines.replicas
        what = What("gradients", self._lines.stage, peers.axis, "all_reduce", x.nbytes, peers.size)
        start = self._lines.recorder.mark()
        work = dist.all_reduce(x, group=peers.group, async_op=True)
        assert work is not None
        return self._lines.recorder.pending(what, work, start)

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self._buckets:
            if bucket not in self._works:
                self._start(bucket)
        moving: list[tuple[_ThinBucket, Waitable]] = []
        for bucket, works in self._works.items():
            for work in works:
                work.wait()
            if self._thin:
                for slot, part in bucket.wholes:
                    _gradient(slot).copy_(part)
                for matrix in bucket.matrices:
                    matrix.left.copy_(orthonormal(matrix.left))
                    torch.mm(matrix.gradient.t(), matrix.left, out=matrix.right)
                if bucket.matrices:
                    moving.append((bucket, self._sum(bucket.then)))
        self._works.clear()
        for bucket, work in moving:
            work.wait()
            for matrix in bucket.matrices:
                self._arrived(matrix)
        self._steps += 1
        if not self._how.warm:
            self._draw(self._steps)

    def _arrived(self, matrix: _Matrix) -> None:
        """The sum over replicas is the product of thin matrices."""
        gradient = matrix.gradient
        if self._how.feedback:
            if matrix.lost is None:
                matrix.lost = torch.empty_like(gradient)
            matrix.lost.copy_(gradient)
            matrix.lost.addmm_(matrix.left, matrix.right.t(), alpha=-self._share)
        torch.mm(matrix.left, matrix.right.t(), out=gradient)

    def _draw(self, step: int) -> None:
        """Columns to begin with, equal on all replicas."""
        for matrix in self._matrices:
            seed = crc32(f"{step} {matrix.slot.param.fqn}".encode())
            matrix.right.copy_(columns_to_begin_with(matrix.right.shape, seed))

    @property
    def kept(self) -> list[Tensor]:
        own = [x for bucket in self._buckets for x in (bucket.first, bucket.then)]
        return own + [m.lost for m in self._matrices if m.lost is not None]

    def state(self) -> SyncState:
        if not self._steps:
            return {}
        found: dict[str, object] = {"steps": self._steps}
        for index, matrix in enumerate(self._matrices):
            found[f"right {index}"] = matrix.right.clone()
            if matrix.lost is not None:
                found[f"lost {index}"] = matrix.lost.clone()
        return found

    def load(self, state: SyncState) -> None:
        self._steps = int(state.get("steps", 0))
        self._draw(self._steps)
        for index, matrix in enumerate(self._matrices):
            matrix.lost = None
            if f"lost {index}" in state:
                matrix.lost = state[f"lost {index}"].clone()
            if f"right {index}" in state:
                matrix.right.copy_(state[f"right {index}"])


def _gradient(slot: Slot) -> Tensor:
    """What this replica has of a gradient, in the order of its values."""
    x = slot.whole
    if x.grad is None:
        x.grad = torch.zeros_like(x, requires_grad=False, memory_format=torch.contiguous_format)
    elif not x.grad.is_contiguous():
        x.grad = x.grad.contiguous()
    return x.grad


def orthonormal(x: Tensor) -> Tensor:
    """Returns [rows, rank] orthonormal columns that span those of x, also of one without any."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    found: Tensor = torch.linalg.qr(wide).Q
    return found.to(x.dtype)


def columns_to_begin_with(shape: Sequence[int], seed: int) -> Tensor:
    """Returns normal random numbers in float64, equal for equal arguments on all machines."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
