"""What a way of synchronising gradients is given, and what it has to do."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.codegen.program import Param
from meshwright.ir.kernels import bucket
from meshwright.ir.measured import Purpose
from meshwright.ir.torch_private import reduce_scatter, start_all_gather
from meshwright.runtime.pieces import chunk_rows
from meshwright.runtime.record import Pending, Recorder, What

BUCKET_BYTES = 25 * 2**20
"""DDP's default: large enough to use the bandwidth, small enough to overlap with backward."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of a stage as its blocks read it."""

    param: Param
    whole: nn.Parameter
    """The tensor-parallel local tensor, whole on dp."""
    calls: tuple[int, ...]
    """Indices of the stage's calls that read it, ascending."""

    @property
    def owner(self) -> int:
        """The call whose backward is the last to add to its gradient."""
        return self.calls[0]

    @property
    def rows(self) -> int:
        return self.whole.shape[0] if self.whole.ndim else 1


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter as this rank's optimizer holds it: whole, or some rows."""

    param: Param
    stage: int
    tensor: nn.Parameter
    rows: tuple[int, int] | None
    """Rows of the tensor-parallel local tensor; None: all."""
    primary: bool
    """No other rank with these elements counts or writes them."""


@dataclass(frozen=True, eq=False)
class Lines:
    """The ranks among which a stage's parameters are replicated or sharded."""

    stage: int
    dp: dist.ProcessGroup | None
    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    model: Mapping[str, dist.ProcessGroup | None]
    """Per model axis."""
    coordinates: Mapping[str, int]
    """On all axes of the stage."""
    shard_size: int
    recorder: Recorder
    kernels: frozenset[str] = frozenset()
    """Fused ones that the plan has places for."""

    def is_primary(self, param: Param, *, sharded: bool) -> bool:
        """Whether this rank stands for all that hold the same elements."""
        copies = ["dp_replicate" if sharded else "dp", *(self.model.keys() - set(param.split_on))]
        return not any(self.coordinates[axis] for axis in copies)

    @property
    def shard_coordinate(self) -> int:
        return self.coordinates["dp_shard"]

    @property
    def first_of_replica(self) -> bool:
        """Whether the rank has coordinate 0 on all model axes."""
        return not any(self.coordinates[axis] for axis in self.model)


class GradientSync(Protocol):
    """Called by the stage and the job, by all ranks of a line in the same order."""

    held: tuple[Held, ...]
    """What the optimizer gets. After `finish`, gradients are summed over dp (only there)."""

    def begin(self) -> None:
        """Before the first micro-batch of a step: gradients are zero."""

    def open(self, call: int, ahead: Sequence[int]) -> None:
        """The call's parameters are about to be read; those of `ahead` may be fetched meanwhile."""

    def close(self, call: int) -> None:
        """They have been read."""

    def after_backward(self, call: int, last: bool) -> None:
        """The call's gradients of a micro-batch have been added; `last`: none will follow."""

    def finish(self) -> None:
        """All micro-batches are over."""

    def over_gradients(self, stepped: Set[int]) -> list[Tensor]:
        """Of the tensors that the optimizer steps, by id: those whose new values it is to write
        over their gradients too, from where `publish` takes them."""

    def publish(self) -> None:
        """The optimizer has stepped."""


def buckets(slots: Sequence[Slot], limit_bytes: int) -> list[list[Slot]]:
    """Consecutive slots of one dtype, in the order in which backward completes them.

    A bucket is closed when it has `limit_bytes`; with 0, each owner has its own.
    """
    found: list[list[Slot]] = []
    for slot in sorted(slots, key=lambda slot: -slot.owner):
        last = found[-1] if found else []
        joins = last and last[-1].whole.dtype == slot.whole.dtype and (
            last[-1].owner == slot.owner or sum(s.whole.nbytes for s in last) < limit_bytes
        )  # fmt: skip
        if joins:
            last.append(slot)
        else:
            found.append([slot])
    return found


def sum_over_replicas(flat: Tensor, lines: Lines) -> None:
    """A flat shard becomes the sum over dp_replicate."""
    if lines.replicate is not None:
        size = lines.replicate.size()
        what = What("gradients", lines.stage, "dp_replicate", "all_reduce", flat.nbytes, size)
        with lines.recorder.collective(what):
            dist.all_reduce(flat, group=lines.replicate)


class ShardedBucket:
    """Slots that are cut in rows over dp_shard and move together: flat, rank by rank, padded."""

    def __init__(self, slots: Sequence[Slot], lines: Lines) -> None:
        self.slots, self.lines = tuple(slots), lines
        self.owner = min(slot.owner for slot in slots)
        self._row = [slot.whole.numel() // max(slot.rows, 1) for slot in slots]
        self._chunk = [
            -(-slot.rows // lines.shard_size) * row
            for slot, row in zip(slots, self._row, strict=True)
        ]
        self.size = sum(self._chunk)
        """Elements of one rank's flat shard."""
        self._tables = self._make_tables() if "bucket" in lines.kernels else None

    def _make_tables(self) -> tuple[Tensor, Tensor]:
        """What a kernel moves of whole tensors, and of this rank's rows of them."""
        device = self.slots[0].whole.device
        whole = [slot.whole.numel() for slot in self.slots]
        own = [
            (stop - start) * row
            for (start, stop), row in zip(map(self.rows, self.slots), self._row, strict=True)
        ]
        found = bucket.table(whole, self._chunk, self.lines.shard_size)
        return found.to(device), bucket.table(own, self._chunk, 1).to(device)

    def rows(self, slot: Slot) -> tuple[int, int]:
        return chunk_rows(slot.rows, self.lines.shard_size, self.lines.shard_coordinate)

    def flat(self, parts: int) -> Tensor:
        """Room for the flat shards of `parts` ranks."""
        first = self.slots[0].whole
        return torch.zeros((parts, self.size), dtype=first.dtype, device=first.device)

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Whole tensors, one per slot, as all ranks' flat shards; None is zero."""
        return self._packed(tensors, 0, self.lines.shard_size)

    def _packed(self, tensors: Sequence[Tensor | None], table: int, parts: int) -> Tensor:
        if self._tables is None:
            return bucket.packed(tensors, self.flat(parts), self._chunk)
        dtype = self.slots[0].whole.dtype
        found: Tensor = bucket.pack(
            list(tensors), self._tables[table], self._chunk, parts, 1.0, dtype
        )
        return found

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Writes all ranks' flat shards to whole tensors, one per slot."""
        if self._tables is None:
            bucket.unpacked(flat, tensors, self._chunk)
        else:
            bucket.unpack(flat, list(tensors), self._tables[0], self._chunk)

    def views(self, flat_shard: Tensor) -> list[Tensor]:
        """This rank's rows of each slot, in its flat shard."""
        found = []
        parts = torch.split(flat_shard.reshape(-1), self._chunk)
        for slot, row, part in zip(self.slots, self._row, parts, strict=True):
            start, stop = self.rows(slot)
            shape = (stop - start, *slot.whole.shape[1:]) if slot.whole.ndim else (stop - start,)
            found.append(part[: (stop - start) * row].view(shape))
        return found

    def pack_shards(self, shards: Sequence[Tensor]) -> Tensor:
        """This rank's rows, one tensor per slot, as its flat shard."""
        return self._packed(shards, 1, 1)

    def gather(self, flat_shard: Tensor) -> tuple[Tensor, Pending]:
        """Starts to fetch all ranks' flat shards."""
        flat = flat_shard.new_empty((self.lines.shard_size, self.size))
        what = self._what("parameters", "all_gather", flat.nbytes)
        start = self.lines.recorder.mark()
        work = start_all_gather(flat.view(-1), flat_shard.view(-1), self.lines.shard)
        return flat, self.lines.recorder.pending(what, work, start)

    def scatter(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Pending]:
        """Starts the sum of whole gradients over dp_shard; this rank's flat shard comes out."""
        flat = self.pack(gradients)
        mine = flat.new_empty(self.size)
        what = self._what("gradients", "reduce_scatter", flat.nbytes)
        start = self.lines.recorder.mark()
        work = reduce_scatter(mine, flat.view(-1), self.lines.shard)
        return mine, self.lines.recorder.pending(what, work, start)

    def _what(self, purpose: Purpose, primitive: str, nbytes: int) -> What:
        return What(purpose, self.lines.stage, "dp_shard", primitive, nbytes, self.lines.shard_size)
