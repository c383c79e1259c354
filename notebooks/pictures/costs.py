"""Where time and memory go."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from meshwright import Plan
from meshwright.ir.plan.show import SHARES
from meshwright.tools.report.contents import contents
from pictures.pipeline import rank_names
from pictures.style import BYTES, CLOCK, SECONDS, WIDTH, closed, legend


def step(plan: Plan) -> Figure:
    """Where the step goes, per pipeline rank."""
    rows = contents(plan)["ranks"]
    figure, ax = plt.subplots(figsize=(WIDTH, 0.95 + 0.42 * len(rows)))
    used = stacked(ax, [row["seconds"] for row in rows], SECONDS)
    ax.set(yticks=range(len(rows)), yticklabels=rank_names(plan, len(rows)))
    ax.xaxis.set_major_formatter(CLOCK)
    ax.set_title("Where the step goes")
    legend(figure, {SHARES[name]: SECONDS[name] for name in used})
    return closed(figure)


def memory(plan: Plan) -> Figure:
    """What each pipeline rank holds when that is most, against what a plan may use."""
    groups = sorted(contents(plan)["memory"], key=lambda group: group["ranks"][0])
    names = rank_names(plan, len(plan.schedule.rows))
    figure, ax = plt.subplots(figsize=(WIDTH, 0.95 + 0.42 * len(groups)))
    rows = [{name: size / 1e9 for name, size in group["peak"].items()} for group in groups]
    used = stacked(ax, rows, BYTES)
    for y, group in enumerate(groups):
        if group["room"]:
            ax.plot([group["room"] / 1e9] * 2, [y - 0.45, y + 0.45], color="#b3382c", lw=2)
    held_by = [_some([names[rank] for rank in group["ranks"]]) for group in groups]
    ax.set(yticks=range(len(groups)), yticklabels=held_by, xlabel="GB; red: what a plan may use")
    ax.set_title("Peak memory of a device")
    legend(figure, {name: BYTES[name] for name in used})
    return closed(figure)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")


def stacked(ax: Axes, rows: Sequence[dict[str, float]], colours: dict[str, str]) -> Sequence[str]:
    """Bars on top of each other; the categories that are worth a colour in the legend."""
    whole = max(sum(row.values()) for row in rows)
    used = [name for name in colours if max(row.get(name, 0.0) for row in rows) > whole * 0.002]
    for y, row in enumerate(rows):
        left = 0.0
        for name in colours:
            ax.barh(y, row.get(name, 0.0), left=left, height=0.7, color=colours[name])
            left += row.get(name, 0.0)
    ax.invert_yaxis()
    ax.tick_params(length=0)
    ax.grid(axis="x")
    ax.spines[["left", "bottom"]].set_visible(False)
    return used


def memory_over_time(plan: Plan, rank: int = 0, *, ax: Axes | None = None) -> Figure:
    """What comes and goes on a pipeline rank over the schedule, on top of what stays."""
    group = next(g for g in contents(plan)["memory"] if rank in g["ranks"])
    met_s = contents(plan)["timeline"]["met_s"]
    ax = ax or plt.subplots(figsize=(WIDTH, 2.6))[1]
    stays = sum(group["peak"][name] for name in ("parameters", "optimizer", "inputs")) / 1e9
    first = group["curve"][0][0]
    times = [(point[0] - first) / 1e7 * met_s for point in group["curve"]]
    moving = ("gradients", "activations", "communication", "workspace")
    curves = [[point[i] / 1e9 for point in group["curve"]] for i in range(1, 5)]
    ax.stackplot(times, [stays] * len(times), *curves, step="post",
                 colors=["#4a8fd0", *(BYTES[name] for name in moving)],
                 labels=["parameters, optimizer", *moving])  # fmt: skip
    if group["room"]:
        ax.axhline(group["room"] / 1e9, color="#b3382c", lw=1.5)
    ax.set(xlim=(0, times[-1]), ylabel="GB")
    ax.xaxis.set_major_formatter(CLOCK)
    ax.set_title(f"Memory of pipeline rank {rank} over the step; red: what a plan may use")
    figure = ax.figure
    assert isinstance(figure, Figure)
    legend(figure, {"parameters, optimizer": "#4a8fd0"} | {n: BYTES[n] for n in moving})
    return closed(figure)


def side_by_side(plans: dict[str, Plan]) -> Figure:
    """Step time by category of the busiest rank, and memory of the fullest, of several plans."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 0.9 + 0.45 * len(plans)), sharey=True)
    times = [max((row["seconds"] for row in contents(p)["ranks"]), key=_busy)
             for p in plans.values()]  # fmt: skip
    held = [{n: b / 1e9 for n, b in contents(p)["memory"][0]["peak"].items()}
            for p in plans.values()]  # fmt: skip
    spent, kept = stacked(axes[0], times, SECONDS), stacked(axes[1], held, BYTES)
    axes[1].invert_yaxis()
    axes[0].xaxis.set_major_formatter(CLOCK)
    axes[0].set(yticks=range(len(plans)), yticklabels=list(plans), title="Step, busiest rank")
    axes[1].set(title="Peak memory, fullest rank, GB")
    for ax, used, colours in ((axes[0], spent, SECONDS), (axes[1], kept, BYTES)):
        patches = [Patch(color=colours[name], label=SHARES.get(name, name)) for name in used]
        ax.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3,
                  fontsize=8)  # fmt: skip
    return closed(figure)


def _busy(spent: dict[str, float]) -> float:
    return sum(spent.values()) - spent.get("wait", 0.0)
