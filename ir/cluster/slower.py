"""A cluster some of whose devices are slower than their kind: they throttle, or others use them."""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType


def slower(cluster: Cluster, factors: Mapping[int, float]) -> Cluster:
    """The cluster where devices of these ranks take so many times as long for all they compute,
    each as a type of its own; the same object if none is slower. Links are as they were."""
    known = {device.name: device for device in cluster.device_types}
    if not (factors := {rank: factor for rank, factor in factors.items() if factor > 1}):
        return cluster
    made: dict[str, DeviceType] = {}
    nodes, first = [], 0
    for node in cluster.nodes:
        names = list(node.devices)
        for slot, name in enumerate(node.devices):
            if factor := factors.get(first + slot):
                found = _slower(known[name], factor)
                made[found.name] = found
                names[slot] = found.name
        first += len(names)
        nodes.append(node if names == [*node.devices] else replace(node, devices=tuple(names)))
    used = {name for node in nodes for name in node.devices}
    types = tuple(d for d in (*cluster.device_types, *made.values()) if d.name in used)
    return replace(cluster, nodes=tuple(nodes), device_types=types)


def _slower(device: DeviceType, factor: float) -> DeviceType:
    curves = {
        kind: replace(curve, floor_s=curve.floor_s * factor)
        for kind, curve in device.curves.items()
    }
    return replace(
        device, name=f"{device.name} {factor:g} times slower",
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / factor,
        peak_flops={dtype: rate / factor for dtype, rate in device.peak_flops.items()},
        curves=curves, overhead_s=device.overhead_s * factor,
    )  # fmt: skip
