"""Collectives of this machine's processes, measured in forks that form a Gloo group."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.heap import keep_freed_memory
from meshwright.ir.profile.profile import CollectiveRecord
from meshwright.runtime.profiling.clocks import is_crowded
from meshwright.runtime.profiling.collectives import SIZES, measure_collectives

_SETUP_S = 120.0
_PER_RANK_S = 8.0
"""That measuring every second size takes."""
_FEW = (2**10, 2**22, 2**24)


def forked_collectives(cluster: Cluster, budget_s: float) -> Iterator[CollectiveRecord]:
    """Records as they are made by one process per device of the cluster."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank, args=(rank, cluster, budget_s, store, writer), daemon=True
            )
            for rank in range(cluster.num_devices)
        ]
        try:
            for process in processes:
                process.start()
            writer.close()
            yield from _received(reader, budget_s + _SETUP_S)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _received(reader: Connection, patience_s: float) -> Iterator[CollectiveRecord]:
    """Until the first rank says that it is done."""
    while wait([reader], timeout=patience_s):
        try:
            record = reader.recv()
        except EOFError as error:
            raise MeshwrightError("a process that measured collectives died") from error
        if record is None:
            return
        yield record
    raise MeshwrightError(f"collectives were still not measured after {patience_s:.0f} s")


def _rank(rank: int, cluster: Cluster, budget_s: float, store: str, writer: Connection) -> None:
    # More than one thread in a forked child hangs where the parent has used OpenMP.
    torch.set_num_threads(1)
    keep_freed_memory()
    world = cluster.num_devices
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for record in measure_collectives(
        cluster, budget_s=budget_s, rank=rank, world=world, sizes=sizes_for(cluster, budget_s)
    ):
        if rank == 0:
            writer.send(record)
    dist.barrier()
    if rank == 0:
        writer.send(None)
        writer.close()
    dist.barrier()


def sizes_for(cluster: Cluster, budget_s: float) -> tuple[int, ...]:
    """On shared cores a round takes long and says little: rather more rounds of fewer sizes. In a
    short budget few bytes, what alone says nothing about bandwidth, and as many as buckets of
    gradients have: what a byte more costs is not the same for long messages.

    Sizes beyond what the budget allows are not begun: each would take its time anyway.
    """
    largest = 2**20 if budget_s < 5 else 2**26 if budget_s < 60 else 2**30
    found = SIZES
    if is_crowded(cluster):
        enough = budget_s >= _PER_RANK_S * cluster.num_devices
        found = SIZES[::2] if enough else _FEW
    return tuple(n for n in found if n <= largest)
