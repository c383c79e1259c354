"""Seconds of the simulator and of one estimate, in pure Python on one core.

python benchmarks/simulator_speed.py [-o docs/results/simulator_speed.md]
"""

import argparse
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import process_time

import torch

from benchmarks.trace_full_size import llama_70b
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.schedule_tools import make_schedule

STAGES, MICROBATCHES = 64, 512
BATCH = 1024
PLANS = {
    "pp 16, dp 4 x tp 8, 64 micro-batches, 1F1B": dict(
        pp=16, dp_shard=4, tp=8, zero=1, num_microbatches=64),
    "pp 8, dp 8 x tp 8, 32 micro-batches, zero bubble, ZeRO 2": dict(
        pp=8, dp_shard=8, tp=8, zero=2, num_microbatches=32, schedule="zero_bubble"),
    "pp 8 x 5 stages, dp 8 x tp 8, 64 micro-batches, interleaved": dict(
        pp=8, dp_replicate=8, tp=8, num_microbatches=64, schedule="interleaved"),
    "dp 64 x tp 8, ZeRO 3, 4 micro-batches": dict(dp_shard=64, tp=8, zero=3, num_microbatches=4),
}  # fmt: skip


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median processor time."""
    found = []
    for _ in range(repeats):
        start = process_time()
        work()
        found.append(process_time() - start)
    return median(found)


def simulations() -> list[str]:
    """First and later runs of one schedule: the first also puts its actions in order."""
    rows = []
    for name in ("one_f_one_b", "interleaved", "zero_bubble"):
        ranks = STAGES // 2 if name == "interleaved" else STAGES
        for title, send_s, detail in (
            ("nothing is shared", 0.0, False), ("messages meet", 0.3, False),
            ("events, with a log", 0.3, True),
        ):  # fmt: skip
            make_schedule.cache_clear()
            schedule = make_schedule(name, STAGES, MICROBATCHES, ranks)
            cost = StageTimes(forward_s=1.0, backward_s=2.0, backward_input_s=1.0,
                              backward_weight_s=1.0, send_s=send_s, saved_bytes=1)  # fmt: skip

            def work() -> None:
                simulate(schedule, [cost] * STAGES, detail=detail)  # noqa: B023

            first = seconds(work, 1)
            rows.append(f"| {name} | {title} | {first:.2f} | {seconds(work, 3):.2f} |")
    return rows


def estimates() -> list[str]:
    """Of plans of Llama-3-70B on 512 GPUs whose tables are made."""
    with torch.device("meta"):
        model, sequence = llama_70b()
        ids = torch.zeros(BATCH, sequence, dtype=torch.long)
    graph = trace(model, {"input_ids": ids, "labels": ids})
    cluster = Cluster.preset("h100-sxm", num_nodes=64, devices_per_node=8)
    problem = make_problem(graph, cluster)
    rows = []
    for name, asked in PLANS.items():
        plan = build_plan(problem, uniform_choice(problem, **asked), predict=False)
        tables = problem.tables

        def work(plan=plan, tables: CostTables = tables) -> None:  # type: ignore[no-untyped-def]
            estimate(graph, cluster, plan, tables)

        first = seconds(work, 1)
        rows.append(f"| {name} | {first * 1e3:.0f} | {seconds(work, 9) * 1e3:.2f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines = [
        "# Speed of the simulator", "",
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, one core, "
        "processor seconds.", "",
        f"{STAGES} stages, {MICROBATCHES} micro-batches:", "",
        "| schedule | path | first s | then s |", "|---|---|---|---|", *simulations(), "",
        "One plan of Llama-3-70B on 512 H100, first (tables included) and once they are made:", "",
        "| plan | first ms | then ms |", "|---|---|---|", *estimates(),
    ]  # fmt: skip
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
