"""The ILP searcher against the whole space, on random tiny instances: the same plans, proved.

python benchmarks/exact.py [--instances 320] [-o docs/results/exact.md]
"""

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.found import simplest
from meshwright.planner.search.offers import find_searcher
from meshwright.planner.search.take import run
from meshwright.testing.tiny import Tiny, tiny

CHOICES = 400
"""An instance has at most so many choices, or as few as pins can make it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One instance under both searchers."""

    instance: Tiny
    steps: tuple[float, float]
    """Of the whole space and of the ILP; infinite where nothing fits."""
    simulated: tuple[int, int]
    exhausted: bool
    bound_s: float
    """What the ILP says that no plan beats."""

    @property
    def agrees(self) -> bool:
        ours, theirs = self.steps
        return ours == theirs or abs(ours / theirs - 1) <= 1e-9

    @property
    def is_bounded(self) -> bool:
        return self.bound_s <= 1.001 * self.steps[0]


def compared(instance: Tiny, most: int = CHOICES) -> Row:
    """Both searchers on one instance, with pins until it has no more than so many choices."""
    steps, simulated, exhausted = [], [], True
    for name in ("exhaustive", "ilp"):
        problem = instance.problem(most)
        found = run(problem, find_searcher(name)(problem))
        exhausted = found.exhausted
        best = simplest(problem, found) if found.best else None
        steps.append(_step_s(problem, best))
        simulated.append(found.candidates)
    bound_s = found.bound_s or 0.0
    return Row(instance, (steps[0], steps[1]), (simulated[0], simulated[1]), exhausted, bound_s)


def _step_s(problem: Problem, plan: Plan | None) -> float:
    return plan.predicted.step_s if plan and plan.predicted else float("inf")


def rows(instances: int) -> list[Row]:
    """So many different instances, the same ones every time."""
    found: dict[Tiny, Row] = {}

    @settings(
        max_examples=instances,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(tiny())
    def collect(instance: Tiny) -> None:
        if instance not in found:
            found[instance] = compared(instance)

    collect()
    return list(found.values())


def report(found: list[Row], seconds: float) -> str:
    """Markdown."""
    agree, proved = sum(r.agrees for r in found), sum(r.exhausted for r in found)
    all_of, ours = (sum(r.simulated[i] for r in found) for i in (0, 1))
    fit = sum(r.steps[0] < float("inf") for r in found)
    lines = [
        f"{len(found)} instances: the same step time in {agree}, the whole space covered in "
        f"{proved}. In {len(found) - fit} nothing fits, which both say.",
        f"Plans simulated: {all_of} by the whole space, {ours} by the ILP. {seconds:.0f} s.",
        f"The ILP's lower bound is below the best step in {sum(r.is_bounded for r in found)}.",
        "",
        "| devices | instances | agree |",
        "|---|---|---|",
    ]
    total = Counter(_machine(r) for r in found)
    same = Counter(_machine(r) for r in found if r.agrees)
    lines += [f"| {name} | {total[name]} | {same[name]} |" for name in sorted(total)]
    lines += ["", *(f"- differs: {r.steps} {r.instance}" for r in found if not r.agrees)]
    return "\n".join(lines).rstrip() + "\n"


def _machine(row: Row) -> str:
    return " + ".join(",".join(node) for node in row.instance.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=320)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    text = report(rows(options.instances), time.perf_counter() - start)
    print(text)
    if options.output:
        title = "# The exact planner against the whole space\n\n`python benchmarks/exact.py`\n\n"
        options.output.write_text(title + text)


if __name__ == "__main__":
    main()
