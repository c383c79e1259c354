"""The timeline of a pipeline."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshwright import Plan
from meshwright.ir.plan.show import seconds
from meshwright.tools.report.contents import contents
from meshwright.tools.report.timeline_rows import TICKS
from pictures.style import CLOCK, TRACK, WIDTH, WORKS, closed, legend

MARKED = TICKS // 500
"""Bars that are shorter are not in the legend."""


def timeline(
    plan: Plan, title: str = "", *, ax: Axes | None = None, span_s: float | None = None
) -> Figure:
    """A row per pipeline rank, a bar per action; the number is the micro-batch."""
    data = contents(plan)["timeline"]
    rows = data["predicted"]
    ax = ax or plt.subplots(figsize=(WIDTH, 0.95 + 0.42 * len(rows)))[1]
    used = draw_rows(ax, rows, data)
    ax.set(xlim=(0, span_s or data["span_s"] - _first_s(rows, data)), yticks=range(len(rows)),
           yticklabels=rank_names(plan, len(rows)))  # fmt: skip
    ax.set_title(title or f"{plan.schedule.name}: {seconds(data['step_s'])} per step")
    figure = ax.figure
    assert isinstance(figure, Figure)
    if len(figure.axes) == 1:
        _legend_of(figure, used)
    return closed(figure)


def _first_s(rows: Sequence[Sequence[int]], data: dict[str, Any]) -> float:
    """When the first action starts: before it, the step before may still end on other ranks."""
    return min(row[3] for row in rows if row) * data["span_s"] / data["ticks"]


def works_legend(figure: Figure, *plans: Plan) -> None:
    """What the colours in the plans' timelines mean."""
    names = [*WORKS]
    kinds = {
        names[row[i]]
        for plan in plans
        for row in contents(plan)["timeline"]["predicted"]
        for i in range(0, len(row), 5)
        if row[i + 4] - row[i + 3] > MARKED
    }
    _legend_of(figure, kinds)


def _legend_of(figure: Figure, used: set[str]) -> None:
    """A backward and its half for inputs look alike."""
    shown = {name: WORKS[name] for name in WORKS if name in used}
    if {"backward", "backward, inputs"} <= set(shown):
        del shown["backward, inputs"]
        renamed = {"backward": "backward, or its half for inputs"}
        shown = {renamed.get(name, name): colour for name, colour in shown.items()}
    legend(figure, shown)


def rank_names(plan: Plan, count: int) -> list[str]:
    owners = contents(plan)["ranks"]
    return [f"ranks {row['devices']}" if row["count"] > 1 else f"rank {row['devices']}"
            for row in owners[:count]]  # fmt: skip


def draw_rows(ax: Axes, rows: Sequence[Sequence[int]], data: dict[str, Any]) -> set[str]:
    """Bars of flat rows: kind, stage, micro-batch, start, end."""
    scale, names, used = data["span_s"] / data["ticks"], [*WORKS], set()
    first = min(row[3] for row in rows if row)
    many = max((len(row) for row in rows), default=0) / 5 > 90
    for y, row in enumerate(rows):
        ax.barh(y, data["span_s"], color=TRACK, height=0.8, zorder=0)
        for kind, stage, microbatch, start, end in zip(*[iter(row)] * 5, strict=True):
            if end - start > MARKED:
                used.add(names[kind])
            start, end = start - first, end - first
            later = stage // max(1, len(rows))
            ax.barh(y, (end - start) * scale, left=start * scale, height=0.8,
                    color=WORKS[names[kind]], ec="white", lw=0 if many else 0.6,
                    alpha=0.72 if later % 2 else 1.0)  # fmt: skip
            if not many and microbatch >= 0 and end - start > data["ticks"] / 75:
                ax.text((start + end) / 2 * scale, y, microbatch, ha="center", va="center",
                        color="white", size=7.5)  # fmt: skip
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(CLOCK)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return used
