"""The machines a little different: more memory, faster links."""

from dataclasses import replace

from meshwright.costmodel.comm.comm import sped
from meshwright.ir.cluster.cluster import Cluster


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """Every device with so many times its memory."""
    types = (replace(t, memory_bytes=round(t.memory_bytes * factor)) for t in cluster.device_types)
    return replace(cluster, device_types=tuple(types))


def with_links(
    cluster: Cluster, factor: float, *, between: bool = False, inside: bool = False
) -> Cluster:
    """So many times the bandwidth between nodes, inside them, or both."""
    nodes = tuple(
        replace(
            node,
            link=sped(node.link, factor) if inside else node.link,
            uplink=sped(node.uplink, factor) if between and node.uplink else node.uplink,
        )
        for node in cluster.nodes
    )
    outer = [
        sped(link, factor) if between and link else link
        for link in (cluster.between_nodes, cluster.between_racks)
    ]
    return replace(cluster, nodes=nodes, between_nodes=outer[0], between_racks=outer[1])
