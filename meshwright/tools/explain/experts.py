"""Where a plan's experts lie, in sentences: on which axes, in how many copies, and who travels."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from meshwright.ir.layout.layout import Placement, Shard, Strategy, parse_strategy
from meshwright.ir.placed.route import travels
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage
from meshwright.ir.plan.show import ranges

_OP = "/experts"
"""How the key of a layer of experts ends."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Of equal layers of equal stages."""

    layers: str
    """A layer, or the pattern of several: `model.layers.*`."""
    stages: tuple[int, ...]
    shared_out: dict[str, int]
    """Axis -> ranks, each of which has other experts."""
    in_parts: dict[str, int]
    """Axis -> ranks, each of which has a part of every expert."""
    kept: dict[str, int]
    """Axis -> ranks, each of which keeps a part and gathers the rest for each use."""
    travel: tuple[str, ...]
    """Axes on which tokens go to the ranks of their experts and back."""
    copies: int
    """How often a stage has all of them."""
    one_copy: tuple[int, ...]
    """The ranks of the first copy, in the first of the stages."""

    @property
    def text(self) -> str:
        """One sentence."""
        parts = [f"other experts on each rank of {_sizes(self.shared_out)}"] * bool(self.shared_out)
        parts += [f"a part of each on every rank of {_sizes(self.in_parts)}"] * bool(self.in_parts)
        parts += [f"a part kept on each rank of {_sizes(self.kept)}, gathered for each use"] * bool(
            self.kept
        )
        lie = ", ".join(parts) or "all on every rank"
        goes = f"; tokens travel to them on {' and '.join(self.travel)}" if self.travel else ""
        often = f"{self.copies} copies, the first" if self.copies > 1 else "one copy,"
        where = f"{often} on rank{'s' * (len(self.one_copy) > 1)} {ranges(self.one_copy)}"
        which = f"stage{'s' * (len(self.stages) > 1)} {ranges(self.stages)}"
        return f"{self.layers} ({which}): {lie}{goes}; {where}"


def where_experts_lie(plan: Plan) -> tuple[Experts, ...]:
    """Returns what is said of each kind of layer of experts; nothing for a model without any."""
    found: dict[str, Experts] = {}
    layouts = {layout.name: layout for layout in plan.layouts}
    for index, stage in enumerate(plan.stages):
        for name in stage.layouts.values():
            for new in _of_stage(layouts[name], index, stage):
                # What stages have alike but for their ranks is said once.
                key = replace(new, stages=(0,), one_copy=(0,)).text
                known = found.setdefault(key, new)
                stages = tuple(dict.fromkeys((*known.stages, index)))
                found[key] = replace(known, stages=stages)
    return tuple(found.values())


def _of_stage(layout: BlockLayout, index: int, stage: Stage) -> Iterator[Experts]:
    for key, texts in layout.ops.items():
        if not key.endswith(_OP):
            continue
        read = {axis: parse_strategy(text) for axis, text in texts.items() if axis != "dp"}
        strategies = {axis: one for axis, one in read.items() if len(one.inputs) > 4}
        inside = key.removesuffix(_OP)
        kept = {
            axis
            for name, axes in layout.parameters.items()
            for axis, placed in axes.items()
            if inside and name.startswith(f"{inside}.") and placed.startswith("S(")
        }
        yield _experts(layout.pattern, index, stage, strategies, kept)


def _experts(
    layers: str, index: int, stage: Stage, strategies: dict[str, Strategy], kept: set[str]
) -> Experts:
    sizes = dict(stage.model)
    used = {axis: one.inputs[3] for axis, one in strategies.items() if sizes.get(axis, 1) > 1}
    shared = {axis: sizes[axis] for axis, placed in used.items() if _dim(placed) == 0}
    parts = {axis: sizes[axis] for axis, placed in used.items() if _dim(placed) > 0}
    beside = {axis: n for axis, n in sizes.items() if axis in kept and axis not in shared | parts}
    axes = {*shared, *parts, *beside}
    home = [
        rank
        for rank in stage.devices
        if not any(at for axis, at in stage.coordinates(rank).items() if axis not in axes)
    ]
    return Experts(
        layers=layers,
        stages=(index,),
        shared_out=shared,
        in_parts=parts,
        kept=beside,
        travel=tuple(axis for axis in shared if travels(strategies[axis])),
        copies=len(stage.devices) // prod([sizes[axis] for axis in axes]),
        one_copy=tuple(sorted(home)),
    )


def _dim(placed: Placement) -> int:
    return placed.dim if isinstance(placed, Shard) else -1


def _sizes(axes: dict[str, int]) -> str:
    return " and ".join(f"{axis} {size}" for axis, size in axes.items())
