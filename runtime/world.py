"""Joins the job's processes, on Gloo or NCCL."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.ir.errors import MismatchError
from meshwright.ir.heap import keep_freed_memory

_LATER_S = 60.0


def pick_device(device: torch.device | str | None) -> torch.device:
    """The given device; else this process's GPU if there is one, else the CPU."""
    if device is not None:
        chosen = torch.device(device)
    else:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and chosen.index is None:
        local = dist.get_node_local_rank(fallback_rank=0)
        chosen = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    return chosen


def join(world_size: int, device: torch.device, timeout_s: float) -> bool:
    """Makes the process group unless there is one or none is needed; True if it made it.

    Its own limit is later than `timeout_s`: what watches the ranks names the cause before.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if dist.is_initialized() or world_size == 1:
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s + _LATER_S))
    except ValueError as error:
        raise MismatchError(
            f"the plan is for {world_size} ranks, this process is alone ({error}); start it with "
            f"torchrun --nproc-per-node {world_size}"
        ) from error
    return True


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def from_first(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def of_all(value: Any) -> list[Any]:
    """Every rank's value on every rank."""
    if not dist.is_initialized():
        return [value]
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    return held


def to_first(value: Any) -> list[Any]:
    """Every rank's value on rank 0; nothing on the others."""
    if not dist.is_initialized():
        return [value]
    held: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, held)
    return held or []
