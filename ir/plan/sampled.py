"""Among how many ranks of a replica a layout splits its samples (`ir.layout.samples`)."""

from collections.abc import Mapping
from math import prod

from meshwright.ir.errors import PlanError
from meshwright.ir.layout.layout import Placement, Shard, parse_placement, parse_strategy
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage


def sampled_axes(layout: BlockLayout) -> tuple[str, ...]:
    """Returns the model axes on which some value is split just as on `dp`; what does not parse
    splits nothing."""
    found: set[str] = set()
    for texts in (*layout.inputs, *layout.outputs, *layout.ops.values()):
        if "dp" in texts and len(texts) > 1:
            found |= _as_dp(texts)
    return tuple([axis for axis, _ in layout.model if axis in found])


def sample_ranks(plan: Plan, stage: Stage) -> tuple[tuple[str, ...], int]:
    """Returns the axes of a stage that split samples, and among how many ranks together: of so many
    samples a replica has a multiple."""
    if not stage.model:
        return (), 1
    named = {layout.name: layout for layout in plan.layouts}
    axes: dict[str, None] = {}
    for name in stage.layouts.values():
        if name in named:
            axes |= dict.fromkeys(sampled_axes(named[name]))
    return tuple(axes), prod([dict(stage.model).get(axis, 1) for axis in axes])


def _as_dp(texts: Mapping[str, str]) -> set[str]:
    data = _places(texts["dp"])
    return {
        axis
        for axis, text in texts.items()
        if axis != "dp"
        and any(
            own == placed
            for own, placed in zip(_places(text), data, strict=False)
            if isinstance(placed, Shard)
        )
    }


def _places(text: str) -> tuple[Placement, ...]:
    """Of a placement, or a strategy."""
    try:
        if "->" not in text:
            return (parse_placement(text),)
        strategy = parse_strategy(text)
    except PlanError:
        return ()
    return (*strategy.inputs, *strategy.outputs)
