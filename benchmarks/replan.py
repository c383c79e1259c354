"""Seconds from the loss of a node to a plan for the others: Llama-3-405B on 16,384 H100.

`python -m benchmarks.replan [NODES]` traces the model, searches the plan for all NODES nodes of 8,
then as `meshwright run --elastic` does the plan for one node less; and says what each takes, what
the plans give, and what a search of all that is left alone would have given.
"""

import argparse
import time
from dataclasses import replace

import torch

from benchmarks.search_time.main import CASES, cluster_of, model_of
from meshwright.arguments.targets import Target
from meshwright.ir.cluster.remaining import without
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import search
from meshwright.running.replan import Replanner

CASE = CASES["Llama-3-405B on 16,384"]
HEAD = ("| | devices | CPU s | wall s | step s | plan |", "|---|---|---|---|---|---|")


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def row(self, what: str, plan: Plan) -> str:
        """A row of the table: a plan that took so long."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        assert plan.predicted is not None
        cells = (what, f"{plan.world_size:,}", f"{cpu:.1f}", f"{wall:.1f}",
                 f"{plan.predicted.step_s:.2f}", name_of(plan))  # fmt: skip
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="?", type=int, default=CASE.nodes)
    nodes = parser.parse_args().nodes
    case = replace(CASE, nodes=nodes, batch=CASE.batch * nodes // CASE.nodes)
    graph, cluster = trace(*model_of(case)), cluster_of(case)
    print("\n".join(HEAD), flush=True)
    clock = Clock()
    plan = search(graph, cluster, progress=False, time_limit_s=600)
    print(clock.row("all nodes", plan), flush=True)
    replanner = Replanner(plan, cluster, Target(torch.nn.Module()), _graph=graph)
    lost = range(cluster.num_devices - 8, cluster.num_devices)
    clock = Clock()
    found = replanner.plan_without(lost).plan
    print(clock.row("one node less, by parts that divide too", found), flush=True)
    clock = Clock()
    print(clock.row("the same, known from a search ahead", replanner.plan_without(lost).plan))
    clock = Clock()
    whole = search(graph, without(cluster, lost), progress=False, time_limit_s=600)
    print(clock.row("one node less, all devices alone", whole))


if __name__ == "__main__":
    main()
