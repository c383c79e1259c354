"""Clusters of CPUs whose host is told apart, for plans that move things there."""

from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import HostShare


def apart(
    ranks: int, link_bytes_per_s: float, host_bytes: int = 2**36, memory_bytes: int | None = None
) -> Cluster:
    """Returns a cluster of local processes with a link to the host; `memory_bytes`: of a device.
    Jobs run over a link that is shaped alike (`forms.host_link.shaped`)."""
    local = Cluster.local(ranks)
    (device,) = local.device_types
    share = HostShare(
        memory_bytes=host_bytes, link_bytes_per_s=link_bytes_per_s,
        update_bytes_per_s=device.memory_bandwidth_bytes_per_s, reference="told apart",
    )  # fmt: skip
    room = device.memory_bytes if memory_bytes is None else memory_bytes
    return replace(local, device_types=(replace(device, host=share, memory_bytes=room),))
