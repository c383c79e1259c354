"""What actions of a stage are made of where they run together with those of another, and what such
a pair hides."""

from collections.abc import Sequence

from meshwright.costmodel.block.paired import Course, Part, between, hidden_s
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.simulate.simulate import Together
from meshwright.costmodel.stage.placement import StageCosts, slowdown
from meshwright.ir.memo import Memo
from meshwright.ir.plan.schedule import Schedule

_pairs: Memo[tuple[object, ...], Together] = Memo()


def together(
    tables: CostTables, schedule: Schedule, costs: Sequence[StageCosts]
) -> dict[int, dict[int, Together]]:
    """Stage of a forward -> that of the backward that runs with it -> what the two hide."""
    found: dict[int, dict[int, Together]] = {}
    # Processes that share cores take them from each other: then a collective hides nothing.
    if slowdown(tables.cluster) > 1.0:
        return found
    for ahead, back in {(first.stage, second.stage) for first, second in schedule.pairs}:
        found.setdefault(ahead, {})[back] = _together(tables, costs[ahead], costs[back])
    return found


def _together(tables: CostTables, ahead: StageCosts, back: StageCosts) -> Together:
    forward, backward = _forward(ahead), _backward(back)
    key = tuple([(id(part.cut), *part[1:]) for part in (*forward, *backward)]), len(forward)
    known = _pairs.of(tables)
    if key not in known:
        seconds = hidden_s(forward, backward)
        shares = between(forward, back=False), between(backward, back=True)
        known[key] = Together(seconds, seconds * max(shares))
    return known[key]


def _forward(costs: StageCosts) -> Course:
    return tuple(
        Part(cut, cost.forward_s)
        for cut, cost in zip(costs.cuts, costs.cost.blocks, strict=True)
    )  # fmt: skip


def _backward(costs: StageCosts) -> Course:
    found = []
    for cut, cost, mode in zip(costs.cuts, costs.cost.blocks, costs.modes, strict=True):
        if cut is None:
            found.append(Part(None, cost.backward_input_s + cost.backward_weight_s))
        else:
            # What single ops make again is made before the turns begin.
            again_s = cost.again_s if isinstance(mode, tuple) else 0.0
            found.append(Part(cut, 0.0, again_s, again=mode is True))
    return tuple(found[::-1])
