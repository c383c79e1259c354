"""Runs a function on real Gloo processes, each with a `Comm` whose one axis they form."""

import os
import tempfile
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright.codegen.collectives.comm import Comm

T = TypeVar("T")


def _process(rank: int, ranks: int, folder: str, axis: str, body: Callable[[Comm], T]) -> None:
    torch.set_num_threads(1)
    store = os.path.join(folder, "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    result = body(Comm({axis: dist.group.WORLD}, {axis: ranks}, {axis: rank}))
    torch.save(result, os.path.join(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


def on_gloo(body: Callable[[Comm], T], ranks: int, axis: str = "cp") -> list[T]:
    """What each process finds."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        children = [
            context.Process(target=_process, args=(rank, ranks, folder, axis, body))
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
        assert [child.exitcode for child in children] == [0] * ranks
        return [torch.load(os.path.join(folder, str(rank))) for rank in range(ranks)]
