"""How a search went."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meshwright import Plan
from meshwright.ir.plan.beside import bounded
from meshwright.ir.plan.show import seconds
from pictures.style import CLOCK, SOFT, STAGES, WIDTH, closed


def search(plan: Plan) -> Figure:
    """The best step as the search went on, the bound, and the best plan of every other kind."""
    found, predicted = plan.evidence, plan.predicted
    assert found and predicted
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.4), width_ratios=(1, 1.25))
    progress(left, [(i.candidates, i.step_s) for i in found.improved], found.candidates, STAGES[0])
    if found.bound_s:
        left.axhline(found.bound_s, color="#2b7d5f", ls="--", lw=1.5)
        left.text(found.candidates, found.bound_s, f"{bounded(plan)} can be faster",
                  color="#2b7d5f", va="bottom", ha="right", size=9)  # fmt: skip
    left.set(xlabel="candidates judged", ylim=(0, None), title="The best so far")
    names = [("this plan", predicted.step_s), *((a.name, a.step_s) for a in found.alternatives)]
    for y, (_, step_s) in enumerate(names):
        right.barh(y, step_s, color=STAGES[0] if not y else "#c4c8cf", height=0.7)
        right.text(step_s, y, f" {seconds(step_s)}", va="center", size=8.5, color=SOFT)
    right.set(yticks=range(len(names)), xlim=(0, max(s for _, s in names) * 1.15),
              title="The best plan of every other kind")  # fmt: skip
    right.set_yticklabels([name for name, _ in names], size=8)
    right.invert_yaxis()
    for ax, axis in ((left, left.yaxis), (right, right.xaxis)):
        axis.set_major_formatter(CLOCK)
        ax.tick_params(length=0)
        ax.grid(axis="y" if ax is left else "x")
    return closed(figure)


def progress(
    ax: Axes, improved: Sequence[tuple[int, float]], last: int, colour: str, label: str = ""
) -> None:
    """A falling staircase: after so many candidates, this was the best step."""
    at = [count for count, _ in improved] + [max(last, improved[-1][0] + 1)]
    best = [step_s for _, step_s in improved] + [improved[-1][1]]
    ax.step(at, best, where="post", color=colour, lw=2, label=label)
    ax.plot(at[:-1], best[:-1], "o", color=colour, ms=4)
