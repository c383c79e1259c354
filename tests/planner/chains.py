"""Chains of measured layers, whose time is all computing: bounds are close to what is simulated."""

from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.profile.layer_profile import LayerProfile, MeasuredLayer
from meshwright.planner.problem.problem import Problem, make_problem

KEPT_BYTES = 10**8
"""Per sample and layer, where all is kept."""


def chain(layers: int, batch: int) -> Graph:
    """Equal layers with next to no parameters and small borders."""
    profile = LayerProfile(
        name=f"chain{layers}",
        layers=tuple(
            MeasuredLayer(f"node{i}", "layer", 0.01, 0.02, (4096,), 4096) for i in range(layers)
        ),
        edges=tuple((i, i + 1) for i in range(layers - 1)),
        micro_batch=1,
    )
    kept = {layer.name: KEPT_BYTES for layer in profile.layers}
    return profiled_graph(profile, batch, kept_bytes=kept)


def machine(devices: int) -> Cluster:
    """One node whose links are fast."""
    base = Cluster.preset("v100-16", devices_per_node=devices)
    return replace(base, name=f"node:{devices}")


def problem(layers: int, batch: int, devices: int, *pins: str) -> Problem:
    return make_problem(
        chain(layers, batch), machine(devices), precision="fp32", optimizer="sgd",
        constraints=("saved=none", *pins),
    )  # fmt: skip
