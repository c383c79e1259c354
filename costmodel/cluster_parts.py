"""A cluster whose device types and links are changed, wherever they are named."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import DeviceType, Link


def with_parts(
    cluster: Cluster,
    device: Callable[[DeviceType], DeviceType],
    inside: Callable[[Link], Link],
    between: Callable[[Link], Link],
) -> Cluster:
    """Returns the cluster with what the functions make of its device types, of the links inside of
    nodes, and of those between them. Nodes that were one object stay one."""
    known: dict[int, Node] = {}
    for node in cluster.nodes:
        if id(node) not in known:
            up = node.uplink
            known[id(node)] = replace(node, link=inside(node.link), uplink=up and between(up))
    network, racks = cluster.between_nodes, cluster.between_racks
    return replace(
        cluster,
        device_types=tuple(map(device, cluster.device_types)),
        nodes=tuple(known[id(node)] for node in cluster.nodes),
        between_nodes=network and between(network),
        between_racks=racks and between(racks),
    )
