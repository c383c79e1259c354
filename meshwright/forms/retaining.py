"""How a form of retention runs, what it is given and when it is called; what it says it costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What becomes of a memory between its block's forward and backward, per byte of it.

    PlanError if a figure is negative or no number.
    """

    held: float = 1.0
    """Bytes on the device."""
    moved: float = 0.0
    """Bytes that go to the host's memory when the block has run, and are back for its backward."""
    copied: float = 0.0
    """Bytes that the device reads and writes to hold it otherwise; and again to undo that."""

    def __post_init__(self) -> None:
        for name in ("held", "moved", "copied"):
            share = getattr(self, name)
            if not (isfinite(share) and share >= 0):
                raise PlanError(f"{self}: {name} must be 0 or more, such as {abs(share):g}")


AS_IT_IS = Footprint()
NOTHING = Footprint(held=0.0)
"""Its maker runs again."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor looks into its storage."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        size, stride = tuple(tensor.shape), tensor.stride()
        return cls(tensor.dtype, int(tensor.storage_offset()), size, stride)

    def into(self, other: Tensor) -> Tensor:
        """Return a tensor of this geometry in the storage of another."""
        made = torch.empty(0, dtype=self.dtype, device=other.device)
        return made.set_(other.untyped_storage(), self.offset, self.size, self.stride)


def whole(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor as bytes."""
    nbytes = tensor.untyped_storage().nbytes()
    return Geometry(torch.uint8, 0, (nbytes,), (1,)).into(tensor)


@dataclass(eq=False, slots=True, weakref_slot=True)
class KeptMemory:
    """The memory behind some tensors that a block's backward needs, in the hands of one form."""

    here: Tensor | None
    """All of it as bytes, [bytes], from the beginning of a storage; None while it is elsewhere."""
    dtype: torch.dtype
    """Of the tensor that autograd kept first."""
    instead: Any = field(default=None)
    """What the form has in its place."""

    @classmethod
    def of(cls, tensor: Tensor) -> "KeptMemory":
        """Take the whole memory of a tensor."""
        return cls(whole(tensor), tensor.dtype)

    def view(self, like: Geometry) -> Tensor:
        """Return a tensor that looks into it as one did when it was made."""
        assert self.here is not None, "brought back before it is used"
        return like.into(self.here)


class RetentionRun:
    """One form in one stage on one rank. What it has no use for it leaves as it is here."""

    ahead = False
    """Whether it helps to call `fetch` before it is a block's turn."""

    def produced(self, memories: Sequence[KeptMemory]) -> None:
        """The block that made these has run, and none of them leaves it: they may go elsewhere."""

    def fetch(self, memories: Sequence[KeptMemory]) -> None:
        """The backward of the block after theirs begins: they may come back beside it."""

    def needed(self, memories: Sequence[KeptMemory]) -> None:
        """Their block's backward begins: afterwards each is `here`, with the bytes that it had."""
