"""GPUs that experts' products of 8-bit floats have no kernel for."""

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.scaled_groups import check_capability
from meshwright.ir.ops.experts import has_narrow_experts


def check_experts(graph: Graph, cluster: Cluster, style: str) -> None:
    """PlanError where a job of ours could not run; other stacks have kernels of their own."""
    if style or not any(map(has_narrow_experts, graph.ops)):
        return
    for device in cluster.device_types:
        if device.capability:
            check_capability(device.capability, device.name)
