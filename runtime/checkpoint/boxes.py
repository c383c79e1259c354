"""Global tensors of which each rank holds some boxes, and what of a checkpoint fills them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.manifest import StoredPiece, StoredTensor, Wanted
from meshwright.runtime.checkpoint.parts import Box
from meshwright.runtime.checkpoint.shard_boxes import ShardBox
from meshwright.runtime.checkpoint.values import dtype_name


@dataclass(frozen=True, eq=False)
class Boxed:
    """The boxes of one global tensor that this rank holds."""

    shape: tuple[int, ...]
    parts: tuple[tuple[ShardBox, Tensor], ...]
    """Boxes, and the local tensors that hold them."""
    writes: bool = True
    """False where another rank (or copy) writes the same elements."""


@dataclass(frozen=True, eq=False, slots=True)
class Copy:
    """What of a stored piece goes into a local tensor."""

    source: tuple[slice, ...]
    target: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Fill:
    """A stored piece that this rank needs, and all that it fills."""

    name: str
    dtype: str
    piece: StoredPiece
    copies: tuple[Copy, ...]

    @property
    def wanted(self) -> Wanted:
        """What is to be read; it may go straight to where it is the whole of a local tensor."""
        x, room = self.copies[0].target, None
        if (
            len(self.copies) == 1
            and x.device.type == "cpu"
            and x.is_contiguous()
            and x.nbytes == self.piece.nbytes
        ):
            room = x.reshape(-1).view(torch.uint8)
        return Wanted(self.name, self.dtype, self.piece, room)


def to_write(content: Mapping[str, Boxed]) -> list[Box]:
    """The boxes that this rank writes."""
    return [
        Box(name, boxed.shape, piece.offsets, piece.of_local(tensor).detach())
        for name, boxed in content.items()
        if boxed.writes
        for piece, tensor in boxed.parts
    ]


def to_fill(
    contents: Sequence[Mapping[str, Boxed]], stored: Mapping[str, StoredTensor]
) -> list[Fill]:
    """What fills every box of this rank, in the order of the files; each piece is read once."""
    copies: dict[tuple[str, StoredPiece], list[Copy]] = {}
    for content in contents:
        for name, boxed in content.items():
            if not boxed.parts:
                continue
            found = _stored(stored, name, boxed)
            for box, tensor in boxed.parts:
                _check_dtype(name, found, tensor)
                filled = 0
                for piece, copy in _copies(box, tensor.detach(), found):
                    copies.setdefault((name, piece), []).append(copy)
                    filled += copy.target.numel()
                if filled != box.of_local(tensor).numel():
                    raise PlanError(f"the checkpoint lacks a part of {name!r} at {box.offsets}")
    order = sorted(copies, key=lambda key: (key[1].file, key[1].start))
    return [Fill(key[0], stored[key[0]].dtype, key[1], tuple(copies[key])) for key in order]


def _copies(
    box: ShardBox, tensor: Tensor, found: StoredTensor
) -> Iterator[tuple[StoredPiece, Copy]]:
    for piece in found.pieces:
        source, target = [], []
        for at, size, own, length, local in zip(
            piece.offsets, piece.sizes, box.offsets, box.sizes, box.local_offsets, strict=True
        ):
            first, last = max(at, own), min(at + size, own + length)
            if first >= last:
                break
            source.append(slice(first - at, last - at))
            target.append(slice(first - own + local, last - own + local))
        else:
            local_part = tensor[tuple(target)] if target else tensor.view(())
            yield piece, Copy(tuple(source), local_part)


def _stored(stored: Mapping[str, StoredTensor], name: str, boxed: Boxed) -> StoredTensor:
    found = stored.get(name)
    if found is None:
        raise PlanError(f"the checkpoint has no tensor {name!r}; it is of another model")
    if found.shape != boxed.shape:
        raise PlanError(
            f"{name!r} has shape {found.shape} in the checkpoint, {boxed.shape} in the model"
        )
    return found


def _check_dtype(name: str, found: StoredTensor, tensor: Tensor) -> None:
    wanted = dtype_name(tensor.dtype)
    if found.dtype != wanted:
        raise PlanError(f"{name!r} is {found.dtype} in the checkpoint, {wanted} in the model")


def copy(fill: Fill, read: Tensor) -> None:
    """Puts a piece that was read where it belongs."""
    with torch.no_grad():
        for part in fill.copies:
            if part.target.data_ptr() != read.data_ptr():  # else it was read into its place
                part.target.copy_(read[part.source])
