"""Runs every feasible plan of the demo on this machine: is the one that search returns the best?

Prints predicted and measured step time of each plan, Spearman's rank correlation, and how far the
chosen plan is from the fastest measured. Steps are timed on forked Gloo ranks; the order of plans
is shuffled so that a drifting machine does not favour one kind.

    python -m benchmarks.demo_ranking [--steps 3] [--limit N] [-o docs/results/demo_ranking.md]
"""

import argparse
import random
import statistics
import time
from itertools import product
from pathlib import Path

import torch

from meshwright import demo
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.plan_comparison import kind_of
from meshwright.planner.search.search import search
from meshwright.profiling.measure_local import measure_local
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks

LAYOUTS = [(pp, dp, 4 // pp // dp) for pp, dp in product((1, 2, 4), (1, 2, 4)) if pp * dp <= 4]


def pins() -> list[tuple[str, ...]]:
    """Every combination of layout, ZeRO level, recompute, micro-batches and schedule.

    The schedules with several stages per rank or split backward are run where they can win: without
    recompute and below ZeRO 2.
    """
    found = []
    for (pp, dp, tp), recompute, count in product(LAYOUTS, ("none", "full"), (1, 2, 4, 8)):
        if demo.BATCH // count < dp:
            continue
        for zero in range(4 if dp > 1 else 1):
            schedules = ["one_f_one_b"]
            if pp > 1 and count > 1:
                schedules.append("gpipe")
                if recompute == "none" and zero < 2:
                    schedules += ["interleaved", "zero_bubble", "zbv"]
            row = (f"pp={pp}", f"tp={tp}", f"dp_shard={dp}", f"zero={zero}",
                   f"recompute={recompute}", f"num_microbatches={count}")  # fmt: skip
            found += [(*row, f"schedule={schedule}") for schedule in schedules]
    return found


def measure(graph, plan: Plan, steps: int) -> float:
    """Median seconds of a step, after one that warms up."""
    torch.set_num_threads(1)
    job = compile_job(demo.build_model(), plan, graph=graph, optimizer="adamw", lr=1e-4)
    batch = next(demo.batches())
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        job.step(batch)
        seconds.append(time.perf_counter() - start)
    job.close()
    return statistics.median(seconds[1:])


def spearman(first: list[float], second: list[float]) -> float:
    """Rank correlation; ties do not occur among measured times."""

    def ranks(values: list[float]) -> torch.Tensor:
        return torch.tensor(values).argsort().argsort().double()

    pair = torch.stack([ranks(first), ranks(second)])
    return torch.corrcoef(pair)[0, 1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cluster = measure_local(demo.RANKS)
    example = next(demo.batches())
    graph = trace(demo.build_model(), example)

    def plan_for(constraints: tuple[str, ...]) -> Plan:
        return search(graph, cluster, precision="fp32", constraints=constraints, progress=False)

    chosen = plan_for(())
    rows: dict[str, tuple[str, Plan]] = {}
    for constraints in pins():
        try:
            plan = plan_for(constraints)
        except (Infeasible, PlanError) as error:
            print(f"not feasible: {' '.join(constraints)}: {error}")
            continue
        rows[plan.hash] = (" ".join(constraints), plan)
    order = list(rows.values())
    random.Random(0).shuffle(order)
    order = order[: options.limit] if options.limit else order
    lines, results = [], []
    print(f"chosen: {kind_of(chosen)}")
    run_ranks(demo.RANKS, measure, graph, chosen, 1, timeout_s=300)  # first pages of the machine
    for name, plan in [("chosen by search", chosen), *order]:
        assert plan.predicted
        measured = max(run_ranks(demo.RANKS, measure, graph, plan, options.steps, timeout_s=300))
        results.append((name, plan.predicted.step_s, measured))
        print(f"{plan.predicted.step_s:8.3f} s  {measured:8.3f} s  {name}", flush=True)
    best = min(measured for _, _, measured in results)
    correlation = spearman([row[1] for row in results], [row[2] for row in results])
    lines.append(f"plans run: {len(results)}; Spearman rank correlation {correlation:.3f}")
    lines.append(
        f"chosen: {results[0][2]:.3f} s; fastest: {best:.3f} s; ratio {results[0][2] / best:.3f}"
    )
    print("\n".join(lines))
    if options.output:
        rows_text = [f"| {n} | {p:.3f} | {m:.3f} |" for n, p, m in sorted(results, key=by_measured)]
        head = ["# Every plan of the demo, run", "", *lines, ""]
        head += ["| plan | predicted s | measured s |", "|---|---|---|"]
        options.output.write_text("\n".join([*head, *rows_text]) + "\n")


def by_measured(row: tuple[str, float, float]) -> float:
    return row[2]


if __name__ == "__main__":
    main()
