"""Clusters side by side: the best plan on each, or why there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.show import seconds
from meshwright.ir.text.terminal import Terminal
from meshwright.ir.text.units import size
from meshwright.planner.search.objectives import cost_per_step, price_per_hour, rating
from meshwright.planner.search.plan_comparison import name_of


@dataclass(frozen=True, slots=True)
class Ranked:
    """One cluster with its best plan, or why it has none."""

    cluster: Cluster
    plan: Plan | None
    why: str = ""
    others: tuple[Plan, ...] = ()
    """Plans that are predicted to take little more."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Clusters, the best first, those without a plan last."""

    objective: str
    entries: tuple[Ranked, ...]

    @property
    def best(self) -> Plan:
        """The plan on the best cluster; Infeasible if no cluster has one."""
        plan = self.entries[0].plan
        if plan is None:
            raise Infeasible(_reasons(self.entries))
        return plan

    @property
    def finalists(self) -> tuple[Plan, ...]:
        """The best plan and those that may be as fast, on the best cluster."""
        return (self.best, *self.entries[0].others)

    def rows(self) -> list[dict[str, Any]]:
        """The numbers of the table."""
        return [figures(entry) for entry in self.entries]

    def table(self) -> Table:
        """For people."""
        return _table(self)

    def __str__(self) -> str:
        console = Terminal(file=StringIO(), width=140, color_system=None, legacy_windows=False)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def rank_clusters(
    clusters: Sequence[Cluster], objective: str, solve: Callable[[Cluster], Sequence[Plan]]
) -> Ranking:
    """The clusters in order of their best plans; equal ones in the order given.

    `solve` gives the best plan of a cluster, then others that may be as fast.
    """
    if not clusters:
        raise PlanError("no cluster to search on; give at least one")
    found = []
    for cluster in clusters:
        try:
            best, *others = solve(cluster)
            found.append(Ranked(cluster, best, others=tuple(others)))
        except Infeasible as error:
            found.append(Ranked(cluster, None, str(error)))
    found.sort(key=lambda entry: _key(objective, entry))
    return Ranking(objective, tuple(found))


def _key(objective: str, entry: Ranked) -> tuple[float, ...]:
    if entry.plan is None:
        return (1.0,)
    largest = -entry.plan.global_batch_size if objective == "batch" else 0
    return (0.0, largest, *rating(objective, entry.cluster, entry.plan))


def _reasons(entries: Sequence[Ranked]) -> str:
    if len(entries) == 1:
        return entries[0].why
    return "\n".join(f"{entry.cluster.name}: {entry.why}" for entry in entries)


def figures(entry: Ranked) -> dict[str, Any]:
    """The numbers of one line of the table; what is not known is left out."""
    if entry.plan is None:
        return {"cluster": entry.cluster.name, "why": entry.why}
    assert entry.plan.predicted
    found: dict[str, Any] = {
        "cluster": entry.cluster.name,
        "plan": name_of(entry.plan),
        "global_batch_size": entry.plan.global_batch_size,
        "step_s": entry.plan.predicted.step_s,
        "samples_per_s": entry.plan.predicted.samples_per_s,
        "peak_bytes": entry.plan.predicted.peak_bytes,
    }
    if entry.cluster.prices_per_hour is not None:
        found["price_per_hour"] = price_per_hour(entry.cluster, entry.plan)
        per_sample = cost_per_step(entry.cluster, entry.plan) / entry.plan.global_batch_size
        found["cost_per_million_samples"] = 1e6 * per_sample
    return found


def _table(ranking: Ranking) -> Table:
    shown = Table(box=SIMPLE_HEAD, title=f"Clusters by {ranking.objective}", title_justify="left",
                  pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    shown.add_column("#")
    for name in ("cluster", "plan"):
        shown.add_column(name, overflow="fold")
    for name in ("batch", "step", "samples/s", "peak", "per hour", "per 1M samples"):
        shown.add_column(name, justify="right")
    for number, entry in enumerate(ranking.entries, 1):
        row = figures(entry)
        if entry.plan is None:
            shown.add_row("-", row["cluster"], row["why"])
            continue
        priced = "price_per_hour" in row
        shown.add_row(
            str(number), row["cluster"], row["plan"], str(row["global_batch_size"]),
            seconds(row["step_s"]), f"{row['samples_per_s']:.4g}", size(row["peak_bytes"]),
            f"{row['price_per_hour']:.2f}" if priced else "-",
            f"{row['cost_per_million_samples']:.2f}" if priced else "-",
        )  # fmt: skip
    return shown
