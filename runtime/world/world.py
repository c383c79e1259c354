"""Joins the job's processes, on Gloo or NCCL."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Self

import torch
import torch.distributed as dist

from meshwright.ir.comm.by_store import judged
from meshwright.ir.errors import MismatchError
from meshwright.ir.heap import keep_freed_memory
from meshwright.ir.plan.plan import DeviceKind
from meshwright.ir.torch_private import store_of_launcher
from meshwright.runtime.world.open_files import make_room

BACKEND = "MESHWRIGHT_BACKEND"
"""Environment variable: the backend of process groups that a job makes, as torch writes them."""
_joined = count()
"""Groups of a job that this process has made where the plan decided: as many as any other rank."""


def pick_device(device: torch.device | str | None, kind: DeviceKind | None = None) -> torch.device:
    """Returns the given device; else one of the plan's kind; else this process's GPU if there is
    one; else the CPU. A plan for GPUs runs on CPUs where there is no GPU."""
    if device is not None:
        chosen = torch.device(device)
    else:
        chosen = torch.device("cuda" if kind != "cpu" and torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and chosen.index is None:
        local = dist.get_node_local_rank(fallback_rank=0)
        chosen = torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    return chosen


def join(
    world_size: int, asked: torch.device | str | None, timeout_s: float,
    kind: DeviceKind | None = None,
) -> bool:  # fmt: skip
    """Makes the process group unless there is one or none is needed; True if it made it.

    MESHWRIGHT_BACKEND decides its backend, else the device that is `asked` for, else, where there
    are GPUs, what rank 0's plan is for. `kind` is that of this rank's plan, if it has one.
    """
    if dist.is_initialized() or world_size == 1:
        return False
    timeout = timedelta(seconds=timeout_s)
    try:
        store, own, size = store_of_launcher(timeout)
        backend = _decided(asked) or _as_first(store, own, "gloo" if kind == "cpu" else "nccl")
        _make_room(backend, size)
        dist.init_process_group(backend, store=store, rank=own, world_size=size, timeout=timeout)
    except ValueError as error:
        raise MismatchError(
            f"the plan is for {world_size} ranks, this process is alone ({error}); start it with "
            f"torchrun --nproc-per-node {world_size}"
        ) from error
    return True


def _decided(asked: torch.device | str | None) -> str:
    """The same on all ranks, also on those that do not have the plan yet; nothing where the plan
    decides. What ranks tell each other on the host goes through the store, so GPUs need no Gloo."""
    if own := os.environ.get(BACKEND):
        return own
    if asked is None and torch.cuda.is_available():
        return ""
    return "nccl" if asked is not None and torch.device(asked).type == "cuda" else "gloo"


def _as_first(store: Any, rank: int, own: str) -> str:
    """Rank 0's backend. A store may outlive a group: every time has a key of its own."""
    key = f"backend/{next(_joined)}"
    if rank == 0:
        store.set(key, own)
    return str(store.get(key).decode())


def _make_room(backend: str, world_size: int) -> None:
    if "gloo" in backend:
        make_room(int(os.environ.get("WORLD_SIZE", world_size)))  # it connects all with all


def take(device: torch.device) -> None:
    """Makes the device this process's own; MismatchError if ranks are on devices of two kinds, or
    if NCCL is to connect two that share a GPU. Every rank calls it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    known = backends()
    if known and dist.get_world_size() > 1 and device.type not in known:
        raise MismatchError(
            f"the process group that there is already has no backend for {device.type} "
            f"({dist.get_backend_config()}), on which this job runs; make it with "
            f"init_process_group('cpu:gloo,cuda:nccl'), or leave that to meshwright"
        )
    by_nccl = known.get("cuda") == "nccl"
    if problem := judged(_place(device), lambda places: _problem(places, by_nccl)):
        raise MismatchError(problem)


def backends() -> dict[str, str]:
    """Kind of device -> backend of the job's process group; nothing if there is none."""
    if not dist.is_initialized():
        return {}
    pairs = (pair.partition(":") for pair in dist.get_backend_config().split(","))
    return {kind: backend for kind, _, backend in pairs}


def _problem(places: Sequence[tuple[str, str, str]], by_nccl: bool) -> str:
    try:
        check_devices([*map(RankPlace.of, places)], by_nccl)
    except MismatchError as error:
        return str(error)
    return ""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank computes."""

    host: str
    kind: str
    gpu: str = ""
    """What no two GPUs have in common."""

    @classmethod
    def of(cls, parts: tuple[str, str, str]) -> Self:
        return cls(*parts)


def _place(device: torch.device) -> tuple[str, str, str]:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return socket.gethostname(), device.type, gpu


def check_devices(places: Sequence[RankPlace], by_nccl: bool) -> None:
    """MismatchError unless the ranks of a job can work together."""
    for rank, place in enumerate(places):
        if place.kind != places[0].kind:
            raise MismatchError(
                f"rank {rank} is on {place.kind}, rank 0 on {places[0].kind}: pass the same device "
                "to compile() on every rank, such as device='cpu'"
            )
        first = places.index(place)
        if by_nccl and place.gpu and first != rank:
            here = [other for other in places if other.host == place.host]
            raise MismatchError(
                f"{len(here)} ranks on {place.host}, {len({p.gpu for p in here})} GPU: ranks "
                f"{first} and {rank} share one, which NCCL refuses. Start as many ranks as there "
                f"are GPUs, or run on CPUs with device='cpu', or for a test choose a backend that "
                f"can, such as {BACKEND}=gloo, which only sums and broadcasts what is on GPUs"
            )


def rank() -> int:
    """The rank of this process; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0
