"""Layers with given times, on machines of given links."""

from dataclasses import replace

from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import Link
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.profile.layer_profile import parse_layer_profile
from meshwright.planner.problem.problem import Problem, make_problem

Layers = list[tuple[float, int, int]]
"""Milliseconds of forward and backward, bytes that leave, bytes of parameters; of one sample."""


def chain(layers: Layers, batch: int) -> Graph:
    lines = [
        f"node{i} -- layer -- forward_compute_time={ms / 3}, backward_compute_time={2 * ms / 3}, "
        f"activation_size={sent}, parameter_size={weights}"
        for i, (ms, sent, weights) in enumerate(layers)
    ]
    lines += [f"\tnode{i} -- node{i + 1}" for i in range(len(layers) - 1)]
    return profiled_graph(parse_layer_profile("\n".join(lines), "chain", 1), batch)


def machines(nodes: int, devices: int, inside: float, between: float) -> Cluster:
    """Nodes whose links have so many bytes per second for each device."""
    device = replace(
        presets.device("v100-16"), memory_bandwidth_bytes_per_s=1e15, overhead_s=0.0, curves={}
    )
    node = Node(
        devices=(device.name,) * devices,
        link=Link(name="inside", bandwidth_bytes_per_s=inside, latency_s=0.0),
    )
    link = Link(name="between", bandwidth_bytes_per_s=between, latency_s=0.0)
    return Cluster(name="hand", device_types=(device,), nodes=(node,) * nodes, between_nodes=link)


def problem(layers: Layers, batch: int, cluster: Cluster, **asked: object) -> Problem:
    return make_problem(chain(layers, batch), cluster, precision="fp32", **asked)  # type: ignore[arg-type]
