"""A cluster without some of its devices."""

from collections.abc import Collection
from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError


def without(cluster: Cluster, lost: Collection[int]) -> Cluster:
    """What is left when the devices of some ranks are gone, with its ranks numbered anew in the
    same order; the same object if none is. PlanError if nothing is left."""
    if not lost:
        return cluster
    gone, nodes, first = set(lost), [], 0
    for node in cluster.nodes:
        ranks = range(first, first + len(node.devices))
        kept = tuple(name for rank, name in zip(ranks, node.devices, strict=True)
                     if rank not in gone)  # fmt: skip
        first += len(node.devices)
        if kept:
            nodes.append(node if kept == node.devices else replace(node, devices=kept))
    if not nodes:
        raise PlanError(f"cluster {cluster.name!r}: all its {first} devices are lost")
    used = {name for node in nodes for name in node.devices}
    types = tuple(device for device in cluster.device_types if device.name in used)
    return replace(
        cluster, name=f"{cluster.name} less {len(gone)}", nodes=tuple(nodes), device_types=types
    )
