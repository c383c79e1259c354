"""What actions of a stage are made of where they run together with those of another, and what such
a pair hides."""

from collections.abc import Sequence

from meshwright.costmodel.block.paired import Course, CoursePart, between, hidden_s
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.simulate.simulate import HiddenTogether
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.ir.memo import Memo
from meshwright.ir.plan.schedule import Schedule

_pairs: Memo[tuple[object, ...], HiddenTogether] = Memo()


def together(
    tables: CostTables, schedule: Schedule, costs: Sequence[StageCosts]
) -> dict[int, dict[int, HiddenTogether]]:
    """Stage of a forward -> that of the backward that runs with it -> what the two hide."""
    found: dict[int, dict[int, HiddenTogether]] = {}
    # Processes that share cores take them from each other: then a collective hides nothing.
    if slowdown(tables.cluster) > 1.0:
        return found
    for ahead, back in {(first.stage, second.stage) for first, second in schedule.pairs}:
        found.setdefault(ahead, {})[back] = _together(tables, costs[ahead], costs[back])
    return found


def _together(tables: CostTables, ahead: StageCosts, back: StageCosts) -> HiddenTogether:
    forward, backward = _forward(ahead), _backward(back)
    key = tuple([(id(part.cut), *part[1:]) for part in (*forward, *backward)]), len(forward)
    known = _pairs.of(tables)
    if key not in known:
        seconds = hidden_s(forward, backward)
        shares = between(forward, back=False), between(backward, back=True)
        known[key] = HiddenTogether(seconds, seconds * max(shares))
    return known[key]


def _forward(costs: StageCosts) -> Course:
    return tuple(
        CoursePart(cut, cost.forward_s)
        for cut, cost in zip(costs.cuts, costs.cost.blocks, strict=True)
    )  # fmt: skip


def _backward(costs: StageCosts) -> Course:
    found = []
    for cut, cost, mode in zip(costs.cuts, costs.cost.blocks, costs.modes, strict=True):
        if cut is None:
            found.append(CoursePart(None, cost.backward_input_s + cost.backward_weight_s))
        else:
            # What single ops make again is made before the turns begin.
            again_s = cost.again_s if isinstance(mode, tuple) else 0.0
            found.append(CoursePart(cut, 0.0, again_s, again=mode is True))
    return tuple(found[::-1])
