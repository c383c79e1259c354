"""The cluster of a row from its words: device presets and networks."""

import re
from dataclasses import replace
from functools import lru_cache

from benchmarks.published.measured import RowError
from benchmarks.published.rows import Row
from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.errors import PlanError

# Words of a GPU's name, all of which it must have, and the preset; the first that fits.
_GPUS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("v100", "32"), "v100-32"), (("v100",), "v100-16"),
    (("a100", "40"), "a100-40"), (("a100",), "a100-80"), (("a800",), "a100-80"),
    (("h100", "hbm2e"), "h100-hbm2e"), (("h100", "96"), "h100-hbm2e"),
    (("h100", "95"), "h100-hbm2e"), (("h100",), "h100-sxm"), (("h800",), "h100-sxm"),
    (("h200",), "h200"), (("h20",), "h20"), (("gb200",), "gb200"), (("b200",), "b200"),
    (("gb300",), "gb300"), (("b300",), "b300"),
    (("mi300x",), "mi300x"),
    (("l40s",), "l40s"), (("l4",), "l4"), (("4090",), "rtx4090"), (("3090",), "rtx3090"),
    (("a6000",), "rtx-a6000"), (("a10g",), "a10g"), (("a10",), "a10"), (("t4",), "t4"),
    (("p100",), "p100"),
)  # fmt: skip
_NETWORKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("roce", "4 x 100"), "roce-4x100g"), (("roce", "8 x 200"), "roce-8x200g"),
    (("roce", "8 x 100"), "roce-8x100g"),
    (("p4d",), "efa-p4d"), (("p5", "efa"), "efa-p5"), (("p6", "efa"), "efa-p6"),
    (("tcp",), "ethernet-100g"),
)  # fmt: skip
_NVLINK_CUT = {"a800": 200e9, "h800": 200e9}
"""NVLink of the export versions, bytes/s each way (400 GB/s both ways; vendor data sheet)."""


def device_of(gpu: str) -> DeviceType:
    """The preset that a name means."""
    low = gpu.lower()
    for words, name in _GPUS:
        if all(word in low for word in words):
            return presets.device(name)
    raise RowError(f"no device preset fits {gpu!r}; the presets are {', '.join(presets.DEVICES)}")


def _as_launched(row: Row) -> Row:
    """On the network that the run used.

    bench_cluster's launch script (base_bench.slurm) loads the modules that bring EFA's library to
    NCCL only since 2024-10-24 (f55b5e5, "fix throughput issue ... lib linking"), after the old
    bench. NCCL then uses TCP over the one card of a p5 node that is not for EFA alone.
    """
    if row.network or "bench_cluster" not in row.system.lower():
        return row
    return replace(row, network="tcp")


def cluster_of(row: Row) -> Cluster:
    """The nodes of a row, on the network that the run used."""
    per_node = min(row.gpus, row.gpus_per_node)
    network = _as_launched(row).network
    return _cluster(row.gpu, device_of(row.gpu).name, row.gpus, per_node, network)


@lru_cache(maxsize=256)
def _cluster(gpu: str, name: str, gpus: int, per_node: int, network: str) -> Cluster:
    try:
        inside, usual = presets.MACHINES[name]
    except KeyError:
        raise RowError(f"no machine is known for {name}") from None
    link = presets.LINKS[inside]
    for word, cut in _NVLINK_CUT.items():
        if word in gpu.lower():
            link = replace(link, bandwidth_bytes_per_s=cut, curves=())
    nodes = max(1, -(-gpus // per_node))
    between = _network(network, usual, per_node, nodes)
    node = Node(devices=(name,) * per_node, link=link)
    try:
        return Cluster(name=f"{name}:{nodes}x{per_node}", device_types=(presets.device(name),),
                       nodes=(node,) * nodes, between_nodes=between)  # fmt: skip
    except PlanError as error:
        raise RowError(str(error)) from error


def _network(words: str, usual: str, per_node: int, nodes: int) -> Link:
    """The network that a row's words give the rate of, or the usual one of its device."""
    low = words.lower()
    for known, name in _NETWORKS:
        if all(word in low for word in known):
            return presets.network(name, per_node, nodes)
    if match := re.search(r"(\d+) ?x ?(\d+) ?gb/s", low):
        return _ports(usual, int(match[1]) * int(match[2]), per_node)
    if match := re.search(r"(\d+) ?x ?hdr(\d+)", low):
        return _ports(usual, int(match[1]) * int(match[2]), per_node)
    if match := re.search(r"(\d+) ?gb/s[^;,]*per gpu", low):
        return _ports(usual, int(match[1]) * per_node, per_node)
    if match := re.search(r"\((\d+) gb/s\)", low):
        return _ports("ethernet-25g", int(match[1]), per_node)
    return presets.network(usual, per_node)


def _ports(like: str, gigabits: int, per_node: int) -> Link:
    """A network like the preset `like` with so many Gb/s per node."""
    link = presets.network(like, per_node)
    rate = gigabits / 8 * 1e9 / per_node
    if abs(rate / link.bandwidth_bytes_per_s - 1) < 0.01:
        return link
    return replace(link, bandwidth_bytes_per_s=rate, curves=())
