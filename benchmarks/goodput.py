"""Goodput of a job on 2,048 nodes of 8 H100 that fail as they did in Llama 3's training.

`python -m benchmarks.goodput [--held S] [--write S] [--back S]` simulates 54 days many times for
each way to go on and each time that a node is away, and prints tables. Steps are what
`python -m benchmarks.replan` predicts of Llama-3-405B.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from meshwright.costmodel.goodput import FaultyCluster, NodesPlan, goodput
from meshwright.ir.faults.mix import HOUR_S, LLAMA_3
from meshwright.ir.plan.show import seconds

DAY_S = 24 * HOUR_S
DAYS, RUNS = 54, 20
NODES, SPARES = 2048, 16
WHOLE, PART = NodesPlan(NODES, 9.49), NodesPlan(1920, 10.875)
"""Plans of `benchmarks.replan`: of all nodes, and of what divides well where one is gone."""
REPAIRS_S = (10 * 60.0, HOUR_S, 4 * HOUR_S, DAY_S)
WAYS: Mapping[str, tuple[int, Sequence[NodesPlan]]] = {
    "restart: wait for the node": (NODES, (WHOLE,)),
    "shrink: the plan for fewer, then grow": (NODES, (WHOLE, PART)),
    "spare: 128 of the nodes from the start": (NODES, (PART,)),
    f"spare: {SPARES} nodes more": (NODES + SPARES, (WHOLE,)),
    f"shrink, and {SPARES} nodes more": (NODES + SPARES, (WHOLE, PART)),
}


def shares(at: FaultyCluster, plans: Sequence[NodesPlan]) -> dict[str, float]:
    """The mean of each share, over runs; of nodes that are there beyond the whole plan's it is what
    all nodes together could do."""
    best_s = WHOLE.step_s * NODES / at.nodes
    found = [goodput(at, plans, best_s, seconds=DAYS * DAY_S, seed=seed) for seed in range(RUNS)]
    names = ("goodput", "slower", "saving", "lost", "back", "waiting", "failures")
    return {name: mean(getattr(run, name) for run in found) for name in names}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held", type=float, default=2.0, help="seconds that a save holds up")
    parser.add_argument("--write", type=float, default=60.0, help="until it is whole")
    parser.add_argument("--back", type=float, default=300.0, help="until it trains again")
    given = parser.parse_args()
    at = FaultyCluster(
        mix=LLAMA_3, nodes=NODES, devices_per_node=8, held_s=given.held, write_s=given.write,
        back_s=given.back, repair_s=0.0,
    )  # fmt: skip
    print("| a node is away | way | goodput | slower | saving | lost | back | waiting | failures |")
    print("|---|---|---|---|---|---|---|---|---|")
    for repair_s in REPAIRS_S:
        for way, (nodes, plans) in WAYS.items():
            found = shares(replace(at, repair_s=repair_s, nodes=nodes), plans)
            count = found.pop("failures")
            cells = " | ".join(f"{share:.1%}" for share in found.values())
            print(f"| {repair_s / HOUR_S:.3g} h | {way} | {cells} | {count:.0f} |")
    print("\n| a save holds up | whole after | best interval | lost in all | at 10 min |")
    print("|---|---|---|---|---|")
    for held_s, write_s in ((0.5, 60), (2, 60), (10, 60), (60, 0), (60, 300)):
        cost = replace(at, held_s=float(held_s), write_s=float(write_s)).cost(NODES)
        interval, best = seconds(cost.interval_s), cost.lost(cost.interval_s)
        cells = f"{held_s:g} s | {write_s} s | {interval} | {best:.1%} | {cost.lost(600.0):.1%}"
        print(f"| {cells} |")


if __name__ == "__main__":
    main()
