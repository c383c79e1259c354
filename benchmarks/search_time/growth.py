"""Draws how the time of a search grows, from the rows of `benchmarks.search_time`."""

import re
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

CPU_S = 4
"""The column of a row with the seconds that the process of the search had a core."""
COLOUR = "#2b6cb0"
GOALS = {"layers": 1.3, "devices": 2.0}
"""Times as long for four times as many."""


def draw(rows: Mapping[str, str], path: Path) -> None:
    """CPU time; `rows`: of cases named "80 layers on 512", as a table has them."""
    points = [
        (*map(int, re.findall(r"\d+", name)), float(line.split("|")[CPU_S]))
        for name, line in rows.items()
    ]
    depth = sorted((layers, took) for layers, devices, took in points if devices == 512)
    width = sorted((devices, took) for layers, devices, took in points if layers == 80)
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    _panel(panels[0], "layers", depth, "Llama-3-70B's layers on 512 devices")
    _panel(panels[1], "devices", width, "80 layers on more devices")
    panels[0].set_ylabel("search, CPU seconds")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(panel: Axes, what: str, points: Sequence[tuple[int, float]], title: str) -> None:
    counts, seconds = zip(*points, strict=True)
    least = counts[0]
    goal = [seconds[0] * GOALS[what] ** log(count / least, 4) for count in counts]
    panel.plot(counts, seconds, "o-", color=COLOUR, label="measured")
    panel.plot(counts, goal, "--", color="grey", label=f"x{GOALS[what]:g} for four times as many")
    for count, took in points:
        panel.annotate(f"{took:.1f}", (count, took), xytext=(0, 7), textcoords="offset points",
                       ha="center", fontsize=8)  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set(xlabel=what, title=title, ylim=(0, 1.25 * max(*seconds, *goal)))
    panel.title.set_size(10)
    panel.legend(fontsize=8)
