"""What a device has of its host: memory, a link, and an optimizer's step there."""

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, HostShare
from meshwright.ir.cluster.links import PCIE_4
from meshwright.ir.presets import PRESETS

_SHARE = 0.8
"""Of the host link's bandwidth that large copies over pinned memory reach; assumption."""
_MEMORY = 2**40
_UPDATE = 100e9
"""Bytes of memory, and bytes per second that a fused step of an optimizer reads and writes, of a
whole node that says nothing of them. Assumption: two sockets of six channels of DDR4-2666 have 256
GB/s on paper, and such a step runs over more streams than a copy does."""


def link_rate(device: DeviceType) -> float:
    """Returns the bytes per second of large copies, each way; of a GPU or where the device says."""
    if device.host is not None:
        return device.host.link_bytes_per_s
    bus = PRESETS[device.name].bus if device.name in PRESETS else PCIE_4
    return bus.bandwidth_bytes_per_s * _SHARE


def host_of(cluster: Cluster, device: DeviceType) -> HostShare | None:
    """Returns what each device of a type has of its host where all devices of the node use it; None
    for CPUs whose memory is their host's."""
    if device.host is not None or not device.is_apart:
        return device.host
    sharing = max(len(node.devices) for node in cluster.nodes if device.name in node.devices)
    return HostShare(
        memory_bytes=_MEMORY // sharing, link_bytes_per_s=link_rate(device),
        update_bytes_per_s=_UPDATE / sharing, reference="a node of two sockets",
    )  # fmt: skip
