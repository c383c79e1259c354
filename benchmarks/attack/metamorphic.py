"""What must hold between searches, on random small models and mixed clusters: no pin helps, the
order of nodes never matters, more of anything never hurts, each plan keeps the rules."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from benchmarks.attack.result import Result
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.errors import Infeasible, MeshwrightError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.layer_profile import LayerProfile, MeasuredLayer
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.offers import TIE
from meshwright.planner.search.search import search_problem

INSTANCES = 40
"""At full size."""
SAME = 1e-9
"""Steps of plans that are the same differ by no more."""


@dataclass(frozen=True)
class Instance:
    """A model and a cluster."""

    graph: Graph
    cluster: Cluster
    graph_of_faster: Graph
    """The same model as measured on devices that are twice as fast."""
    pins: tuple[str, ...] = ()
    """Of all searches."""


def instance(seed: int, layers: int = 6, batch: int = 16) -> Instance:
    """A chain of at most so many measured layers on nodes of two device types."""
    draw = Random(seed)
    count = draw.randint(2, layers)
    measured = tuple(
        MeasuredLayer(
            f"node{i}", "layer", seconds := draw.choice((0.001, 0.002, 0.004)), 2 * seconds,
            (draw.choice((4_096, 262_144)),), draw.choice((4_096, 4_194_304)),
        )
        for i in range(count)
    )  # fmt: skip
    profile = LayerProfile("chain", measured, tuple((i, i + 1) for i in range(count - 1)), 1)
    kept = {layer.name: draw.choice((1_000_000, 20_000_000)) for layer in measured}
    speed = draw.choice((1.5, 2.3, 4.0))
    graph, faster = (
        profiled_graph(
            profile, batch, kept_bytes=kept, speeds={"slow": times, "fast": times * speed}
        )
        for times in (1.0, 2.0)
    )
    return Instance(graph, _cluster(draw, speed), faster)


def _cluster(draw: Random, speed: float) -> Cluster:
    memory = draw.choice((1, 4)) * 100_000_000
    slow = DeviceType(
        name="slow", kind="cuda", memory_bytes=memory, memory_bandwidth_bytes_per_s=5e11,
        peak_flops={"float32": 1e13},
    )  # fmt: skip
    fast = replace(
        slow, name="fast", memory_bytes=memory * draw.choice((1, 2)),
        peak_flops={"float32": 1e13 * speed},
    )  # fmt: skip
    inside = Link(name="inside", bandwidth_bytes_per_s=draw.choice((1e10, 1e11)), latency_s=5e-6)
    between = Link(name="between", bandwidth_bytes_per_s=draw.choice((1e9, 1e10)), latency_s=2e-5)
    nodes = [("fast",), ("slow",), ("slow",)]
    if draw.random() < 0.5:
        nodes = [(kind,) * 2 for kind in draw.choice((("fast", "slow"), ("slow", "fast")))]
    draw.shuffle(nodes)
    return Cluster(
        name="mixed", device_types=(slow, fast), between_nodes=between,
        nodes=tuple(Node(devices=kinds, link=inside) for kinds in nodes),
    )  # fmt: skip


def solved(given: Instance, *pins: str) -> Plan | None:
    """The plan; None if none fits."""
    problem = make_problem(
        given.graph, given.cluster, precision="fp32", constraints=(*given.pins, *pins)
    )
    try:
        return search_problem(problem, "ilp", time_limit_s=600)
    except Infeasible:
        return None


def pins_of(given: Instance) -> tuple[str, ...]:
    """Single pins of many kinds."""
    batch, devices = given.graph.batch_size, given.cluster.num_devices
    counts = [n for n in range(1, batch + 1) if batch % n == 0]
    return (
        *(f"num_microbatches={n}" for n in counts),
        *(f"pp={n}" for n in range(1, devices + 1)),
        "recompute=none", "recompute=full", "saved=none", "zero=0", "zero=3", "dp_shard=1",
        "schedule=gpipe", "schedule=zero_bubble", "schedule=dapple_pb",
    )  # fmt: skip


def step_s(plan: Plan | None) -> float:
    return plan.predicted.step_s if plan and plan.predicted else float("inf")


def more(given: Instance) -> Iterator[tuple[str, Instance]]:
    """The same with more of something."""
    cluster = given.cluster
    roomy = tuple(replace(d, memory_bytes=2 * d.memory_bytes) for d in cluster.device_types)
    yield "memory", replace(given, cluster=replace(cluster, device_types=roomy))
    faster = tuple(map(_twice_as_fast, cluster.device_types))
    yield (
        "speed",
        replace(given, graph=given.graph_of_faster, cluster=replace(cluster, device_types=faster)),
    )
    between = cluster.between_nodes
    assert between
    quick = replace(between, bandwidth_bytes_per_s=2 * between.bandwidth_bytes_per_s)
    yield "link", replace(given, cluster=replace(cluster, between_nodes=quick))
    inside = tuple(
        replace(
            node,
            link=replace(node.link, bandwidth_bytes_per_s=2 * node.link.bandwidth_bytes_per_s),
        )
        for node in cluster.nodes
    )
    yield "inner link", replace(given, cluster=replace(cluster, nodes=inside))


def _twice_as_fast(device: DeviceType) -> DeviceType:
    return replace(
        device, peak_flops={dtype: 2 * rate for dtype, rate in device.peak_flops.items()},
        memory_bandwidth_bytes_per_s=2 * device.memory_bandwidth_bytes_per_s,
    )  # fmt: skip


def _pins(given: Instance, free: Plan | None, seed: int) -> Iterator[str]:
    for pin in pins_of(given):
        pinned = step_s(solved(given, pin))
        if pinned * (1 + TIE) < step_s(free) * (1 - SAME):
            yield f"{pin} gives {pinned:.6g} s, free {step_s(free):.6g} s"


def _order(given: Instance, free: Plan | None, seed: int) -> Iterator[str]:
    nodes = list(given.cluster.nodes)
    Random(seed).shuffle(nodes)
    for order in (nodes, nodes[::-1]):
        other = solved(replace(given, cluster=replace(given.cluster, nodes=tuple(order))))
        if other is None or free is None:
            if other is not free:
                yield "one order has a plan, the other none"
        elif abs(step_s(other) / step_s(free) - 1) > SAME:
            yield f"orders of nodes give {step_s(free):.6g} and {step_s(other):.6g} s"


def _more(given: Instance, free: Plan | None, seed: int) -> Iterator[str]:
    for what, richer in more(given):
        other = step_s(solved(richer))
        if other > step_s(free) * (1 + TIE):
            yield f"twice the {what} gives {other:.6g} s instead of {step_s(free):.6g} s"


def _rules(given: Instance, free: Plan | None, seed: int) -> Iterator[str]:
    if free is None:
        return
    for finding in free.verify(given.graph, given.cluster):
        if finding.severity == "error":
            yield str(finding)
    assert free.evidence
    if (free.evidence.gap or 0) < 0 or free.evidence.bound_s > step_s(free) * (1 + SAME):
        yield f"bound {free.evidence.bound_s:.6g} s above the step {step_s(free):.6g} s"


Check = Callable[[Instance, Plan | None, int], Iterator[str]]
CHECKS: dict[str, Check] = {
    "rules": _rules, "order": _order, "more": _more, "pins": _pins
}  # fmt: skip


def attacks(size: int, seed: int) -> Iterator[Result]:
    """Every check on every instance."""
    for number in range(max(1, INSTANCES * size // 100)):
        given = instance(seed * 1000 + number)
        free: Plan | None = None
        for name, check in CHECKS.items():
            began = time.monotonic()
            try:
                if name == "rules":
                    free = solved(given)
                wrong = list(check(given, free, seed + number))
            except MeshwrightError as error:
                wrong = [f"{type(error).__name__}: {error}"]
            yield Result(
                f"{name} of instance {number}",
                not wrong,
                "; ".join(wrong) or "holds",
                time.monotonic() - began,
            )
