"""Collectives among the GPUs of a node beside the link model; every rank of torchrun runs it.

torchrun --nproc-per-node N -m benchmarks.gpu.link_ranks FILE PRESET BUDGET_S [MOST_BYTES]
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.costmodel.comm.comm import (
    broadcast_time,
    collective_band,
    collective_time,
    group_levels,
    send_time,
)
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.profile.profile import CollectiveRecord
from meshwright.runtime.profiling.collectives import SIZES, measure_collectives

CPU = "cpu"


def predicted_s(record: CollectiveRecord, cluster: Cluster) -> float:
    """What the link model says of a collective."""
    levels = group_levels(range(record.group.size), cluster)
    if record.operation == "broadcast":
        return broadcast_time(record.nbytes, levels)
    if record.operation == "send":
        return send_time(record.nbytes, levels[0].link)
    return collective_time(Primitive(record.operation), record.nbytes, levels)


def main() -> None:
    """Measures, and writes on rank 0."""
    path, preset, budget_s, *most = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if preset == CPU:
        cluster, device, backend = Cluster.local(world), torch.device("cpu"), "gloo"
        torch.set_num_threads(1)
    else:
        cluster = Cluster.preset(preset, devices_per_node=world)
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    sizes = [size for size in SIZES if not most or size <= int(most[0])]
    found = list(measure_collectives(
        cluster, budget_s=float(budget_s), rank=rank, world=world, sizes=sizes, device=device,
    ))  # fmt: skip
    if rank == 0:
        rows = [
            {
                "operation": record.operation, "size": record.group.size, "nbytes": record.nbytes,
                "measured_s": record.time.expected_s, "predicted_s": predicted_s(record, cluster),
                "band": collective_band(
                    group_levels(range(record.group.size), cluster), record.nbytes
                ),
            }
            for record in found
            if not record.loaded
        ]  # fmt: skip
        Path(path).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
