"""All that the runtime uses of torch and that torch does not call public.

Checked on the versions in CHECKED_ON (see tests/runtime/test_torch_private.py).
"""

from typing import Any

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.distributed_c10d import _get_default_store

CHECKED_ON = ("2.13",)


def job_store() -> Any:
    """A connection of its own to the store through which the ranks of the job met."""
    return _get_default_store().clone()


def read_items(
    name: str, stored: TensorStorageMetadata, chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """What to read of a stored tensor to fill `chunks` of it."""
    return create_read_items_for_chunk_list(name, stored, chunks)
