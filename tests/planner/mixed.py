"""A problem of devices that differ."""

from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster
from tests.planner.problems import cluster


def mixed(samples_memory: int = 10**9) -> Cluster:
    """A node of two fast devices with little memory, and one of two slow ones with much."""
    base = cluster(2)
    toy = base.device_types[0]
    fast = replace(
        toy, name="fast", memory_bytes=samples_memory, peak_flops={"float32": 3e9},
        memory_bandwidth_bytes_per_s=3e9,
    )  # fmt: skip
    slow = replace(toy, name="slow", memory_bytes=4 * 10**9)
    nodes = tuple(replace(base.nodes[0], devices=(name,) * 2) for name in ("fast", "slow"))
    return replace(base, name="mixed", device_types=(fast, slow), nodes=nodes)
