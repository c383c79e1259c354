"""All that the runtime uses of torch and that is not public, or not in every version we support.

Checked on the versions in CHECKED_ON (see tests/runtime/test_torch_private.py).
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.distributed_c10d import _get_default_store

CHECKED_ON = ("2.11", "2.13")

# torch 2.13 renamed these two and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def job_store() -> Any:
    """A connection of its own to the store through which the ranks of the job met."""
    store: Any = _get_default_store()
    return store.clone()


def read_items(
    name: str, stored: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """What to read of a stored tensor to fill `chunks` of it."""
    return create_read_items_for_chunk_list(name, stored, chunks)


def all_gather(result: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Flat: `result` is every rank's `part`, one after the other."""
    _all_gather(result, part, group=group)


def reduce_scatter(result: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Flat: starts to sum `whole` over the ranks; `result` will be this rank's part."""
    work = _reduce_scatter(result, whole, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work
