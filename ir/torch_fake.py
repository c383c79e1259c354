"""Private names of torch for a job of many ranks in one process: a process group that only looks.

Checked on the versions that `ir.torch_private` names.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from meshwright.ir.errors import MismatchError


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is one of many ranks; its collectives return at once, without peers."""
    if dist.is_initialized():
        raise MismatchError(
            "a dry run needs a process of its own: this one is a rank of a real job already"
        )
    store: Any = fake_pg.FakeStore()
    hook = sys.excepthook  # torch puts one before it that says the rank, and leaves it there
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
