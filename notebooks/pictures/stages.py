"""Which blocks each rank holds, and how parameters are split."""

import re
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meshwright import Plan
from meshwright.tools.report.contents import contents
from pictures.style import AXES, INK, SOFT, STAGES, WIDTH, closed, legend


def stages(plan: Plan) -> Figure:
    """Which devices hold which blocks: a row per device, coloured by stage."""
    blocks = contents(plan)["model"]["runs"]
    rows = sorted({rank for stage in plan.stages for rank in stage.devices})
    figure, ax = plt.subplots(figsize=(WIDTH, 0.9 + 0.3 * len(rows)))
    at = 0
    for run in blocks:
        number, colour = run["stage"], STAGES[run["stage"] % len(STAGES)]
        for rank in plan.stages[number].devices:
            ax.barh(rows.index(rank), run["count"], left=at, height=0.84, color=colour,
                    alpha=0.55 if run["treatment"] else 1.0, ec="white", lw=0.8)  # fmt: skip
        at += run["count"]
    _name_stages(ax, plan, blocks, rows)
    ax.set(yticks=range(len(rows)), yticklabels=[f"rank {rank}" for rank in rows], xlim=(0, at),
           xlabel="block, in the order of the model")  # fmt: skip
    ax.invert_yaxis()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    faded = ", pale blocks keep less for their backward" if _some_faded(blocks) else ""
    ax.set_title(f"Which blocks each rank holds{faded}")
    return closed(figure)


def _some_faded(runs: Sequence[dict[str, Any]]) -> bool:
    return any(run["treatment"] for run in runs)


def _name_stages(ax: Axes, plan: Plan, runs: Sequence[dict[str, Any]], rows: Sequence[int]) -> None:
    """In the middle of each stage: its number, blocks and mesh, as far as there is room."""
    at, whole = 0, sum(run["count"] for run in runs)
    for number, stage in enumerate(plan.stages):
        count = sum(run["count"] for run in runs if run["stage"] == number)
        text = f"stage {number}"
        if count > whole * 0.2:
            mesh = [f"{axis} {n}" for axis, n in stage.mesh.items() if n > 1]
            zero = [f"ZeRO {stage.zero}"] if stage.zero else []
            text += f": {', '.join([f'{count} blocks', *mesh, *zero])}"
        middle = rows.index(stage.devices[(len(stage.devices) - 1) // 2])
        ax.text(at + count / 2, middle, text, ha="center", va="center", color="white", size=7.5,
                bbox={"fc": STAGES[number % len(STAGES)], "ec": "none", "pad": 1},
                weight="bold")  # fmt: skip
        at += count


def placements(plan: Plan, pattern: str, stage: int = 0) -> Figure:
    """The parameters of a kind of block, drawn to their shape; of one shade is one rank's part."""
    layout = plan.layout(plan.stages[stage].layouts[pattern])
    assert plan.predicted and plan.predicted.detail
    shapes = plan.predicted.detail.parameters[pattern]
    figure, ax = plt.subplots(figsize=(WIDTH, 3.1))
    at, longest = 0.0, max(max(shape.shape) for shape in shapes.values())
    for key, shape in shapes.items():
        wide, high = _drawn(shape.shape, longest)
        placed = {a: p for a, p in layout.parameters.get(key, {}).items() if p.startswith("S")}
        axis, how = next(iter(placed.items()), ("", ""))
        _parts(ax, (at, 0.0, wide, high), axis, layout.mesh.get(axis, 1), how)
        label = f"{key}  {' x '.join(map(str, shape.shape))}\n{axis} {how}".rstrip()
        ax.text(at + wide / 2 + 0.03, -0.04, label, ha="right", va="top", size=7.5, rotation=32,
                rotation_mode="anchor", color=INK if axis else SOFT)  # fmt: skip
        at += max(wide, 0.16) + 0.14
    ax.set(xlim=(-0.25, at), ylim=(-0.05, 1.02))
    ax.axis("off")
    used = [axis for axis in layout.mesh if axis in AXES]
    legend(figure, {f"split on {axis}": AXES[axis] for axis in used} | {"whole": "#c4c8cf"})
    ax.set_title(f"Parameters of {pattern}: a shade is what one rank holds")
    return closed(figure)


def _drawn(shape: Sequence[int], longest: int) -> tuple[float, float]:
    """Width and height of a parameter: rows go down, columns to the right."""
    rows, columns = (shape[0], shape[-1]) if len(shape) > 1 else (1, shape[0])
    return max(0.05, columns / longest), max(0.05, rows / longest)


def _parts(
    ax: Axes, box: tuple[float, float, float, float], axis: str, ranks: int, how: str
) -> None:
    """Stripes for what `S(dim)` gives each rank; `outer=3` cuts each of three sections."""
    x, y, wide, high = box
    outer = int(found[1]) if (found := re.search(r"outer=(\d+)", how)) else 1
    count = outer * ranks if how else 1
    across = how.startswith("S(1") or high <= 0.05
    for part in range(count):
        share, alpha = part / count, 1 - 0.6 * (part % ranks) / ranks
        cut = ((x + wide * share, y), wide / count, high)
        if not across:
            cut = ((x, y + high * (1 - share - 1 / count)), wide, high / count)
        ax.add_patch(Rectangle(*cut, fc=AXES.get(axis, "#c4c8cf"), alpha=alpha, ec="white", lw=0.8))
