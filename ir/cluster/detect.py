"""The cluster that a torchrun job runs on, from what each of its ranks sees."""

import os
import socket
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.cluster.links import ETHERNET_25G, LOOPBACK, PCIE_4
from meshwright.ir.comm.by_store import of_all
from meshwright.ir.errors import PlanError


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's view."""

    host: str
    device: str
    """Name as CUDA reports it; empty for a CPU process."""
    memory_bytes: int
    cores: int
    multiprocessors: int = 0


def see() -> Seen:
    """What this rank runs on: its local CUDA device, or a share of the CPU."""
    host = socket.gethostname()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not torch.cuda.is_available():
        return Seen(host, "", psutil.virtual_memory().total, cores or 1)
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(index)
    return Seen(
        host, properties.name, properties.total_memory, cores or 1, properties.multi_processor_count
    )


def detect() -> Cluster:
    """All ranks' views, gathered; under torchrun, on every rank."""
    if "RANK" not in os.environ and not dist.is_initialized():
        raise PlanError("Cluster.detect() runs under torchrun; elsewhere use Cluster.local(n)")
    started = not dist.is_initialized()
    if started:
        # NCCL connects nobody before it is used, Gloo all with all.
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    seen = of_all(see())
    if started:
        dist.destroy_process_group()
    return describe(seen)


def describe(seen: list[Seen]) -> Cluster:
    """The cluster whose ranks saw this, in rank order; ranks of a host must follow each other."""
    hosts = list(dict.fromkeys(view.host for view in seen))
    if [view.host for view in sorted(seen, key=lambda v: hosts.index(v.host))] != [
        view.host for view in seen
    ]:
        raise PlanError("ranks of one host must follow each other; start them with torchrun")
    types: dict[str, DeviceType] = {}
    nodes = []
    for host in hosts:
        own = [view for view in seen if view.host == host]
        found = [_device(view, len(own)) for view in own]
        types |= {device.name: device for device in found}
        nodes.append(
            Node(
                devices=tuple(device.name for device in found),
                link=_inside(found[0]),
                cores=0 if own[0].device else own[0].cores,
            )
        )
    return Cluster(
        name=f"detected:{len(nodes)}x{len(nodes[0].devices)}",
        device_types=tuple(types.values()),
        nodes=tuple(nodes),
        between_nodes=_between(nodes[0], len(nodes[0].devices), len(nodes))
        if len(nodes) > 1
        else None,
    )


def _device(view: Seen, ranks_on_host: int) -> DeviceType:
    if not view.device:
        return presets.cpu_process(view.memory_bytes // ranks_on_host)
    words = f" {view.device.replace('-', ' ')} "
    known = {
        name: p for name, p in presets.PRESETS.items()
        if f" {p.reported} " in words
        and not any(f" {p.reported} {other} " in words for other in _OTHER_PARTS)
    }  # fmt: skip
    if not known:
        return _unknown(view)
    closest = max(len(preset.reported) for preset in known.values())
    alike = [presets.DEVICES[name] for name, p in known.items() if len(p.reported) == closest]
    return min(alike, key=lambda device: abs(device.memory_bytes - view.memory_bytes))


_OTHER_PARTS = ("Ti", "SUPER", "D")
"""After the name of a part: it is another one."""


def _unknown(view: Seen) -> DeviceType:
    """A device without a preset: speeds guessed from its size."""
    # 128 float32 FMA lanes per multiprocessor at 1.5 GHz; 8x that in tensor cores.
    float32 = view.multiprocessors * 128 * 2 * 1.5e9
    return DeviceType(
        name=view.device.lower().replace(" ", "-"),
        kind="cuda",
        memory_bytes=view.memory_bytes,
        memory_bandwidth_bytes_per_s=5e11,
        peak_flops={"float32": float32, "float16": 8 * float32, "bfloat16": 8 * float32},
        efficiency=presets.DEVICES["l4"].efficiency,
        overhead_s=6e-6,
        source="assumption",
        reference="not a known device; describe it in a cluster YAML",
    )


def _inside(device: DeviceType) -> Link:
    if device.kind == "cpu":
        return LOOPBACK
    return presets.PRESETS[device.name].link if device.name in presets.PRESETS else PCIE_4


def _between(node: Node, devices_per_node: int, num_nodes: int) -> Link:
    known = presets.PRESETS.get(node.devices[0])
    return (known.network if known else ETHERNET_25G).between(devices_per_node, num_nodes)
