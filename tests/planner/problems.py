"""Tiny problems that every searcher meets."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.graph.graph import Graph
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.testing.models import CASES
from tests.costmodel import models as by_hand
from tests.traces import zoo_graph


@cache
def traced(name: str) -> Graph:
    """A case of the zoo."""
    case = CASES[name]
    return zoo_graph(case)


@cache
def mlp(num_layers: int = 3) -> Graph:
    """Equal residual layers, with a fingerprint."""
    return replace(by_hand.mlp(num_layers), fingerprint=f"mlp{num_layers}")


def cluster(num_devices: int, *, slow: bool = False) -> Cluster:
    """Devices so slow that tiny models take their time, on fast or slow links."""
    device = DeviceType(
        name="toy", kind="cpu", memory_bytes=10**9,
        memory_bandwidth_bytes_per_s=1e9, peak_flops={"float32": 1e9},
    )  # fmt: skip
    rate = 1e7 if slow else 1e9
    link = Link(name="wire", bandwidth_bytes_per_s=rate, latency_s=1e-6, step_s=1e-6)
    base = Cluster.preset("a100-40", devices_per_node=num_devices)
    node = replace(base.nodes[0], devices=("toy",) * num_devices, link=link)
    return replace(base, name=f"toy:{num_devices}", device_types=(device,), nodes=(node,))


def problem(graph: Graph, machine: Cluster, **asked: object) -> Problem:
    return make_problem(graph, machine, **{"precision": "fp32", **asked})  # type: ignore[arg-type]


TINY: dict[str, Callable[[], Problem]] = {
    "one device": lambda: problem(mlp(), cluster(1)),
    "two devices": lambda: problem(mlp(), cluster(2)),
    "slow link": lambda: problem(mlp(), cluster(2, slow=True)),
    "three devices": lambda: problem(mlp(), cluster(3), constraints=("schedule=one_f_one_b",)),
    "pipeline": lambda: problem(mlp(4), cluster(3), constraints=("pp=2", "recompute=none")),
    "tensor": lambda: problem(mlp(), cluster(2), constraints=("tp=2",)),
    "sharded": lambda: problem(mlp(), cluster(2), constraints=("dp_shard=2", "zero=3")),
    "placed": lambda: problem(
        mlp(4), cluster(2), constraints=("block layers.1 on stage 1", "pp=2")
    ),
    "memory": lambda: problem(mlp(), cluster(2), objective="memory"),
    "tight": lambda: problem(mlp(), cluster(2), constraints=("memory<=70kB",)),
    "zero bubble": lambda: problem(mlp(4), cluster(2), constraints=("schedule=zero_bubble",)),
    "interleaved": lambda: problem(
        mlp(4), cluster(2), constraints=("schedule=interleaved", "num_microbatches=4")
    ),
    "traced": lambda: problem(
        traced("sequential"), cluster(2), constraints=("recompute=none", "num_microbatches=2")
    ),
}
