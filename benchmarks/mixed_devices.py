"""A measured model on pairs of A100 and V100: 16 pairs of the one, 48 of the other, each pair as a
device whose layers take the time of both GPUs together.

python -m benchmarks.mixed_devices PROFILE

PROFILE is a layer profile of DAPPLE (bert-48-pbs-2.txt), measured on a V100; an A100 takes 1/2.3 of
its times. What is shown must not depend on how the nodes are ordered, and no pin may help.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.dapple.setup import GB, step_s
from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.profile.layer_profile import read_layer_profile
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search_problem

FASTER, BATCH, PAIRS = 2.3, 2048, 4
"""An A100 to a V100; samples of a step; pairs of a node."""
NODES = {"a100": 4, "v100": 12}
CASES = {
    "free": (("a100", "v100"), ()),
    "32 micro-batches": (("a100", "v100"), ("num_microbatches=32",)),
    "V100 first, 32 micro-batches": (("v100", "a100"), ("num_microbatches=32",)),
    "V100 first, free": (("v100", "a100"), ()),
}


def pair(name: str, preset: str) -> DeviceType:
    """Two GPUs as one device."""
    one = presets.device(preset)
    return replace(
        one, name=name, memory_bytes=2 * one.memory_bytes,
        memory_bandwidth_bytes_per_s=2 * one.memory_bandwidth_bytes_per_s,
        peak_flops={dtype: 2 * rate for dtype, rate in one.peak_flops.items()},
    )  # fmt: skip


def cluster(order: tuple[str, ...], nodes: dict[str, int] = NODES) -> Cluster:
    """Nodes of one type after those of the other."""
    inside = Link(name="nvlink", bandwidth_bytes_per_s=100 * GB, latency_s=5e-6)
    between = Link(name="network", bandwidth_bytes_per_s=6 * GB, latency_s=2e-5)
    types = (pair("a100", "a100-40"), pair("v100", "v100-32"))
    return Cluster(
        name=f"mixed:{'+'.join(order)}", device_types=types, between_nodes=between,
        nodes=tuple(
            Node(devices=(name,) * PAIRS, link=inside)
            for name in order
            for _ in range(nodes[name])
        ),
    )  # fmt: skip


def graph(path: Path, batch: int = BATCH) -> Graph:
    """The profile's step, with how fast both types are."""
    return profiled_graph(read_layer_profile(path), batch, speeds={"v100": 1.0, "a100": FASTER})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--time-limit", type=float, default=60)
    options = parser.parse_args()
    step = graph(options.profile, options.batch)
    print("| case | step s | bound s | search s | plan |\n|---|---|---|---|---|")
    for name, (order, pins) in CASES.items():
        began = time.process_time()
        given = make_problem(
            step, cluster(order), optimizer="adamw", precision="fp32", constraints=pins
        )
        try:
            plan = search_problem(given, time_limit_s=options.time_limit)
        except (Infeasible, PlanError) as error:
            print(f"| {name} | {type(error).__name__}: {error} |", flush=True)
            continue
        assert plan.evidence
        print(
            f"| {name} | {step_s(plan):.4g} | {plan.evidence.bound_s:.4g} | "
            f"{time.process_time() - began:.1f} | {name_of(plan)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
