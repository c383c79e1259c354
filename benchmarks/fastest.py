"""Is the plan that search finds the fastest of those that are really run?

For each of six models on 4 and on 8 processes of this machine: measure the machine, search, write
the predictions, then run the chosen plan, the best of its rivals by prediction and fixed ones of
every kind, in shuffled order, and compare.

    python -m benchmarks.fastest -o DIR [--models gpt2,vit] [--sizes 4,8] [--steps 4] [--minutes 2]
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.accuracy_measure import Effort, run_plan
from benchmarks.accuracy_models import SUBJECTS, Subject
from benchmarks.accuracy_plans import Sketch, plan_of
from meshwright.costmodel.measure import measure_local
from meshwright.ir.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.planner.problem import make_problem
from meshwright.planner.search import search
from meshwright.planner.why import name_of
from meshwright.profiling import profile as measure_profile

PRECISION, OPTIMIZER = "fp32", "adamw"
WITHIN = 1.05
ORDER_SEED = 0
RIVALS = {
    4: (
        Sketch(dp=4), Sketch(dp=4, num_microbatches=2), Sketch(dp=4, zero=1), Sketch(dp=4, zero=3),
        Sketch(dp=2, tp=2), Sketch(tp=4), Sketch(pp=2, dp=2, num_microbatches=4),
        Sketch(pp=2, dp=2, num_microbatches=8), Sketch(pp=4, num_microbatches=8),
        Sketch(pp=4, num_microbatches=8, schedule="zero_bubble"),
    ),
    8: (
        Sketch(dp=8), Sketch(dp=8, num_microbatches=2), Sketch(dp=8, zero=1), Sketch(dp=4, tp=2),
        Sketch(pp=2, dp=4, num_microbatches=4), Sketch(pp=4, dp=2, num_microbatches=8),
        Sketch(pp=8, num_microbatches=16),
    ),
}  # fmt: skip
"""By processes."""
PINNED = (("pp=1",), ("pp=2",), ("tp=2",), ("zero=3",), ("recompute=full",))
"""What search is made to do for further rivals: the best plan of each kind."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan that was run."""

    name: str
    predicted_s: float
    measured_s: float


def rivals(graph: Graph, cluster: Cluster, known: object) -> Iterator[tuple[str, Plan]]:
    """Fixed plans, and the best ones under each pin."""
    problem = make_problem(
        graph, cluster, precision=PRECISION, optimizer=OPTIMIZER,
        profile=known,  # type: ignore[arg-type]
    )  # fmt: skip
    for sketch in RIVALS[cluster.num_devices]:
        try:
            yield sketch.name, plan_of(problem, sketch)
        except PlanError as error:
            print(f"cannot run as {sketch.name}: {error}")
    for pins in PINNED:
        try:
            yield " ".join(pins), find(graph, cluster, known, pins)
        except Infeasible as error:
            print(f"no plan with {pins}: {error}")


def find(graph: Graph, cluster: Cluster, known: object, pins: tuple[str, ...] = ()) -> Plan:
    """What a user would get."""
    return search(
        graph, cluster, precision=PRECISION, optimizer=OPTIMIZER, constraints=pins,
        profile=known, progress=False,  # type: ignore[arg-type]
    )  # fmt: skip


def contest(subject: Subject, size: int, options: argparse.Namespace) -> list[Row]:
    """The chosen plan first, then its rivals."""
    graph, cluster = subject.graph(), measure_local(size)
    sketched = dict(_distinct(rivals(graph, cluster, None)))
    known = measure_profile(
        graph, cluster, precision=PRECISION, optimizer=OPTIMIZER, minutes=options.minutes,
        plans=list(sketched.values()), path=options.output / f"{subject.name}-{size}.db",
        progress=False,
    )  # fmt: skip
    chosen = find(graph, cluster, known)
    others = _distinct(rivals(graph, cluster, known))
    named = [("chosen", chosen), *((n, p) for n, p in others if p.stages != chosen.stages)]
    print(f"{subject.name} on {size}: chosen {name_of(chosen)}", flush=True)
    order = list(range(len(named)))
    random.Random(ORDER_SEED).shuffle(order)
    effort = Effort(warmup=2, steps=options.steps)
    found: dict[int, Row] = {}
    for i in order:
        name, plan = named[i]
        folder = options.output / "runs" / f"{subject.name}-{size}-{i}"
        ran = run_plan(subject, name, graph, plan, folder, 0, effort)
        assert plan.predicted
        label = name_of(plan) if name == "chosen" else f"{name_of(plan)} ({name})"
        found[i] = Row(label, plan.predicted.step_s, ran.step_s)
        print(f"  {found[i].predicted_s:7.3f} {ran.step_s:7.3f} s  {label}", flush=True)
    return [found[i] for i in range(len(named))]


def _distinct(plans: Iterator[tuple[str, Plan]]) -> list[tuple[str, Plan]]:
    """Each plan once, under its first name."""
    seen: dict[tuple[object, ...], tuple[str, Plan]] = {}
    for name, plan in plans:
        seen.setdefault((plan.stages, plan.num_microbatches, plan.schedule), (name, plan))
    return list(seen.values())


def report(contests: dict[tuple[str, int], list[Row]]) -> str:
    """A line per contest, then every plan."""
    held = sum(_ratio(rows) <= WITHIN for rows in contests.values())
    lines = [
        "# The plan that search finds against others that were run", "",
        f"{datetime.now(UTC):%d %B %Y}, 2-core CPU machine, Gloo, float32. "
        f"Within {WITHIN - 1:.0%} of the fastest: {held} of {len(contests)}.", "",
        "| model | processes | plans run | chosen | its step s | fastest | its step s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (model, size), rows in contests.items():
        best = min(rows, key=lambda row: row.measured_s)
        lines.append(
            f"| {model} | {size} | {len(rows)} | {rows[0].name} | {rows[0].measured_s:.3f} | "
            f"{best.name} | {best.measured_s:.3f} | {_ratio(rows):.3f} |"
        )
    for (model, size), rows in contests.items():
        lines += ["", f"## {model} on {size}", "", "| plan | predicted s | measured s |",
                  "|---|---|---|"]  # fmt: skip
        lines += [
            f"| {row.name}{' **chosen**' * (row is rows[0])} | {row.predicted_s:.3f} | "
            f"{row.measured_s:.3f} |"
            for row in sorted(rows, key=lambda row: row.measured_s)
        ]
    return "\n".join(lines) + "\n"


def _ratio(rows: list[Row]) -> float:
    return rows[0].measured_s / min(row.measured_s for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SUBJECTS))
    parser.add_argument(
        "--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[4, 8]
    )
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--minutes", type=float, default=1.0, help="most for each profile")
    parser.add_argument("--report", type=Path, help="default: fastest.md in the folder")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    contests: dict[tuple[str, int], list[Row]] = {}
    path = options.report or options.output / "fastest.md"
    for model in options.models:
        for size in options.sizes:
            contests[model, size] = contest(SUBJECTS[model], size, options)
            path.write_text(report(contests))
    print(report(contests).split("\n## ")[0])


if __name__ == "__main__":
    main()
