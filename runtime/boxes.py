"""Global tensors of which each rank holds some boxes, for torch's distributed checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import read_items
from meshwright.runtime.pieces import Piece


@dataclass(frozen=True, eq=False)
class Boxed:
    """The boxes of one global tensor that this rank holds."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Piece, Tensor], ...]
    """Boxes, and the local tensors that hold them."""
    writes: bool = True
    """False where another rank (or copy) writes the same elements."""

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][1].dtype

    def chunk(self, number: int) -> ChunkStorageMetadata:
        piece, _ = self.parts[number]
        return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))

    def part(self, offsets: torch.Size | None) -> Tensor:
        return next(
            piece.of_local(x) for piece, x in self.parts if torch.Size(piece.offsets) == offsets
        ).detach()


class BoxSavePlanner(DefaultSavePlanner):
    """Writes each box of the state dict's Boxed; every other object from rank 0."""

    def __init__(self, content: Mapping[str, Boxed], coordinator: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxed, self._coordinator = content, coordinator

    def create_local_plan(self) -> SavePlan:
        plain = super().create_local_plan()
        items = [item for item in plain.items if self._coordinator]
        for name, boxed in self._boxed.items():
            for number in range(len(boxed.parts)) if boxed.writes else ():
                items.append(_write_item(name, boxed, number))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self._boxed:
            return self._boxed[index.fqn].part(index.offset)
        return super().lookup_object(index)


def _write_item(name: str, boxed: Boxed, number: int) -> WriteItem:
    chunk = boxed.chunk(number)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets, number),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties(dtype=boxed.dtype),
            size=torch.Size(boxed.shape),
        ),
    )


class BoxLoadPlanner(DefaultLoadPlanner):
    """Fills each box from whatever boxes the checkpoint has."""

    def __init__(self, content: Mapping[str, Boxed]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxed = content

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        items = list(plan.items)
        for name, boxed in self._boxed.items():
            stored = _stored(self.metadata, name, boxed)
            chunks = [boxed.chunk(number) for number in range(len(boxed.parts))]
            items += read_items(name, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self._boxed:
            return self._boxed[index.fqn].part(index.offset)
        return super().lookup_tensor(index)


def _stored(metadata: Metadata, name: str, boxed: Boxed) -> TensorStorageMetadata:
    stored = metadata.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise PlanError(f"the checkpoint has no tensor {name!r}; it is of another model")
    if tuple(stored.size) != boxed.shape:
        raise PlanError(
            f"{name!r} has shape {tuple(stored.size)} in the checkpoint, {boxed.shape} in the model"
        )
    return stored
