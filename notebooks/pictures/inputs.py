"""What a search is given: the traced model and the machines."""

from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshwright import Cluster, Graph
from pictures.style import SOFT, STAGES, WIDTH, box, closed, legend


def model(graph: Graph) -> Figure:
    """What each block of a traced model holds and computes; blocks of one colour are equal."""
    kinds = list(dict.fromkeys(block.pattern for block in graph.blocks))
    colours = [STAGES[kinds.index(block.pattern) % len(STAGES)] for block in graph.blocks]
    places = range(len(graph.blocks))
    figure, axes = plt.subplots(2, 1, figsize=(WIDTH, 4.2), sharex=True)
    numels = {tensor.name: tensor.numel for tensor in graph.parameters}
    held = [sum(numels[name] for name in block.params) / 1e6 for block in graph.blocks]
    flops = [sum(op.flops for op in graph.block_ops(block)) / 1e12 for block in graph.blocks]
    for ax, heights, title in zip(
        axes,
        (held, flops),
        ("Parameters, millions", "Forward of the whole batch, TFLOP"),
        strict=True,
    ):
        ax.bar(places, heights, color=colours, width=0.82)
        ax.set_title(title)
        ax.grid(axis="y")
        ax.tick_params(length=0)
    axes[1].set_xlabel("block, in the order of the model")
    legend(figure, {kind: colours[i] for i, kind in _first_of(graph, kinds)})
    return closed(figure)


def _first_of(graph: Graph, kinds: Sequence[str]) -> Iterable[tuple[int, str]]:
    patterns = [block.pattern for block in graph.blocks]
    return ((patterns.index(kind), f"{kind}  x {patterns.count(kind)}") for kind in kinds)


def cluster(machines: Cluster) -> Figure:
    """Nodes with their devices, and how fast bytes go inside and between them."""
    figure, ax = plt.subplots(figsize=(WIDTH, 2.4))
    at, rank = 0.0, 0
    for number, node in enumerate(machines.nodes):
        wide = len(node.devices) * 1.15 + 0.35
        box(ax, at, 0, wide, 1.75, "white", SOFT)
        ax.text(at + wide / 2, 1.5, f"node {number}", ha="center", va="center", color=SOFT)
        for slot in range(len(node.devices)):
            box(ax, at + 0.25 + slot * 1.15, 0.45, 1.0, 0.75, STAGES[0], "none")
            ax.text(at + 0.75 + slot * 1.15, 0.83, f"{rank}", ha="center", va="center",
                    color="white", weight="bold", size=13)  # fmt: skip
            rank += 1
        link = f"{node.link.name}, {_rate(node.link.rate)}"
        ax.text(at + wide / 2, 0.2, link, ha="center", va="center", color=SOFT, size=8.5)
        at += wide + 2.0
        if number + 1 < machines.num_nodes:
            _between(ax, at, machines)
    ax.set(xlim=(-0.2, at - 1.8), ylim=(-0.1, 1.85))
    ax.axis("off")
    memory = machines.device(0).memory_bytes / 1e9
    ax.set_title(
        f"{machines.name}: {machines.device(0).name} with {memory:.0f} GB each, numbers are ranks"
    )
    return closed(figure)


def _between(ax: Axes, at: float, machines: Cluster) -> None:
    ax.annotate("", (at - 0.05, 0.83), (at - 1.95, 0.83),
                arrowprops={"arrowstyle": "<->", "color": "#d2605a", "lw": 1.8})  # fmt: skip
    link = machines.between_nodes
    assert link
    ax.text(at - 1, 0.98, link.name, ha="center", va="bottom", size=8.5, color="#d2605a")
    ax.text(at - 1, 0.68, f"{_rate(link.rate)}\na device", ha="center", va="top", size=8.5,
            color="#d2605a")  # fmt: skip


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.3g} GB/s"
