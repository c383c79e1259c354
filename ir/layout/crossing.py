"""Which values cross the borders between stages, and how they are placed there.

A value that is split on model axes crosses as it is placed if all stages that it passes have the
same model mesh and take it so: each rank sends its part to the ranks with its coordinates on the
model axes. Otherwise the block that makes it makes it whole on model axes first.
"""

from dataclasses import dataclass

from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.layout.layout import Layout, R, parse_placement
from meshwright.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that blocks make: from which stage to which it travels, and placed how."""

    home: int
    last: int
    layout: Layout

    def enters(self, stage: int) -> bool:
        return self.home < stage <= self.last

    def leaves(self, stage: int) -> bool:
        return self.home <= stage < self.last


def crossings(plan: Plan, graph: Graph) -> dict[str, Crossing]:
    """Every value that crosses a border, in the order in which they are made."""
    home: dict[str, tuple[int, Layout]] = {}
    last: dict[str, int] = {}
    taken: dict[str, list[Layout]] = {}
    for index in range(len(plan.stages)):
        own: set[str] = set()
        for block in plan.stage_blocks(graph, index):
            for name in block.inputs:
                if name in home and home[name][0] < index and name not in own:
                    own.add(name)
                    last[name] = index
                    taken.setdefault(name, []).append(_placed(plan, index, block, name))
            for name in block.outputs:
                home[name] = index, _placed(plan, index, block, name)
    if graph.loss in home:
        last[graph.loss] = len(plan.stages) - 1
    return {
        name: Crossing(made, last[name], _at_border(plan, made, last[name], layout, readers))
        for name, (made, layout) in home.items()
        if last.get(name, made) > made
        for readers in [taken.get(name, [{}])]
    }


def _placed(plan: Plan, stage: int, block: Block, name: str) -> Layout:
    """How the block takes or makes a value."""
    if block.pattern not in plan.stages[stage].layouts:
        return {}
    layout = plan.layout(plan.stages[stage].layouts[block.pattern])
    names = (*block.inputs, *block.outputs)
    texts = (*layout.inputs, *layout.outputs)[names.index(name)]
    return {axis: parse_placement(text) for axis, text in texts.items()}


def _at_border(plan: Plan, first: int, last: int, layout: Layout, readers: list[Layout]) -> Layout:
    meshes = {stage.model for stage in plan.stages[first : last + 1]}
    if len(meshes) == 1 and all(same_on_model(layout, reader) for reader in readers):
        return layout
    return {axis: placement for axis, placement in layout.items() if axis == "dp"}


def same_on_model(layout: Layout, other: Layout) -> bool:
    """Whether two placements are equal on the model axes."""
    axes = (layout.keys() | other.keys()) - {"dp"}
    return all(layout.get(axis, R) == other.get(axis, R) for axis in axes)
