"""Processes that share the cores of their machine."""

from meshwright.ir.cluster.cluster import Cluster


def slowdown(cluster: Cluster) -> float:
    """Times by which a process is slower when all work at once; above 1 where cores are shared."""
    return max((max(1.0, len(n.devices) / n.cores) for n in cluster.nodes if n.cores), default=1.0)


def step_cores(cluster: Cluster) -> float:
    """Processes that can run at full speed at once; infinite where devices share nothing."""
    if slowdown(cluster) == 1.0:
        return float("inf")
    return float(sum(node.cores or len(node.devices) for node in cluster.nodes))
