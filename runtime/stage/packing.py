"""How buckets of parameters and gradients are packed: by copies, or in one pass of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.forms.running import MakePacking, Packing
from meshwright.ir.kernels import bucket


def packing(kernels: frozenset[str]) -> MakePacking:
    """Returns what makes packings for a stage in which these kernels have places."""
    return _ByKernel.of if "bucket" in kernels else _by_copies


@dataclass(frozen=True, eq=False)
class _ByCopies:
    chunks: Sequence[int]
    ranks: int
    like: Tensor

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return bucket.packed(tensors, self._flat(self.ranks), self.chunks)

    def pack_own(self, tensors: Sequence[Tensor]) -> Tensor:
        return bucket.packed(tensors, self._flat(1), self.chunks)

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        bucket.unpacked(flat, tensors, self.chunks)

    def _flat(self, parts: int) -> Tensor:
        shape = (parts, sum(self.chunks))
        return torch.zeros(shape, dtype=self.like.dtype, device=self.like.device)


def _by_copies(
    sizes: Sequence[int], own: Sequence[int], chunks: Sequence[int], ranks: int, like: Tensor
) -> Packing:
    return _ByCopies(chunks, ranks, like)


@dataclass(frozen=True, eq=False)
class _ByKernel:
    whole: Tensor
    """The table of whole tensors."""
    own: Tensor
    """Of this rank's rows of them."""
    chunks: Sequence[int]
    ranks: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, sizes: Sequence[int], own: Sequence[int], chunks: Sequence[int], ranks: int,
        like: Tensor,
    ) -> Packing:  # fmt: skip
        whole = bucket.table(sizes, chunks, ranks).to(like.device)
        return cls(whole, bucket.table(own, chunks, 1).to(like.device), chunks, ranks, like.dtype)

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return self._packed(tensors, self.whole, self.ranks)

    def pack_own(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._packed(tensors, self.own, 1)

    def _packed(self, tensors: Sequence[Tensor | None], rows: Tensor, parts: int) -> Tensor:
        found: Tensor = bucket.pack(list(tensors), rows, self.chunks, parts, 1.0, self.dtype)
        return found

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        bucket.unpack(flat, list(tensors), self.whole, self.chunks)
