"""Colours, fonts and legends of all pictures."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import FuncFormatter

from meshwright.ir.plan.show import seconds

INK, SOFT, LINE, TRACK = "#1d2430", "#5c6675", "#e4e2dc", "#f0eee8"
WORKS = {
    "forward": "#4a8fd0", "backward": "#e59a3f", "backward, inputs": "#e59a3f",
    "backward, weights": "#9277c7", "gradients": "#46a38a", "optimizer": "#c4648a",
    "gathering parameters": "#7d93ad",
}  # fmt: skip
"""Kinds of bars in a timeline, in the order of `meshwright.tools.report`."""
SECONDS = {
    "forward": "#4a8fd0", "backward": "#e59a3f", "recompute": "#c9a227", "tensor": "#d2605a",
    "wait": "#d9d6ce", "gradients": "#46a38a", "gather": "#7d93ad", "optimizer": "#c4648a",
    "overhead": "#8b8f98", "offload": "#3f9fb0",
}  # fmt: skip
BYTES = {
    "parameters": "#4a8fd0", "gradients": "#46a38a", "optimizer": "#c4648a",
    "activations": "#e59a3f", "communication": "#d2605a", "workspace": "#9277c7",
    "inputs": "#a99b82", "fragmentation": "#c4c4c0",
}  # fmt: skip
AXES = {
    "dp": "#4a8fd0", "tp": "#d2605a", "cp": "#3f9fb0", "ep": "#c4648a", "tp_row": "#e59a3f",
    "tp_col": "#9277c7", "tp_depth": "#46a38a",
}  # fmt: skip
STAGES = ("#4a8fd0", "#e59a3f", "#46a38a", "#c4648a", "#9277c7", "#c9a227", "#3f9fb0", "#d2605a")
WIDTH = 10.0
CLOCK = FuncFormatter(lambda value, _: seconds(value) if value else "0")

plt.rcParams |= {
    "figure.dpi": 100, "savefig.dpi": 110, "font.size": 10, "font.family": "DejaVu Sans",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT, "axes.titlecolor": INK, "axes.titlelocation": "left",
    "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlepad": 10,
    "xtick.color": SOFT, "ytick.color": SOFT, "text.color": INK, "legend.frameon": False,
    "axes.axisbelow": True, "grid.color": LINE, "figure.constrained_layout.use": True,
}  # fmt: skip


def box(ax: Axes, x: float, y: float, wide: float, high: float, face: str, edge: str) -> None:
    shape = "round,pad=0,rounding_size=0.08"
    ax.add_patch(FancyBboxPatch((x, y), wide, high, boxstyle=shape, fc=face, ec=edge, lw=1))


def closed(figure: Figure) -> Figure:
    """A notebook shows what a cell returns, and once more what is left open."""
    plt.close(figure)
    return figure


def legend(figure: Figure, colours: dict[str, str]) -> None:
    """Below the whole figure."""
    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)),
                  fontsize=9, handlelength=1.1, handleheight=1.0)  # fmt: skip
