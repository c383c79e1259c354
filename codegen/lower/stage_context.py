"""What lowering one stage on one rank needs to know, and the names readers know values by."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.ir.graph.graph import Block, Graph, Op
from meshwright.ir.layout.layout import (
    Axis,
    Layout,
    R,
    Strategy,
    local_shape,
    parse_placement,
    parse_strategy,
)
from meshwright.ir.plan.plan import BlockLayout, Plan, param_key


@dataclass(frozen=True)
class Where:
    """One stage of a plan, as one rank has it."""

    graph: Graph
    plan: Plan
    stage: int
    axes: dict[str, Axis]
    coordinates: dict[str, int]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.plan.stage_blocks(self.graph, self.stage)

    def layout(self, pattern: str) -> BlockLayout | None:
        """The layout of a pattern; None means all replicated."""
        name = self.plan.stages[self.stage].layouts.get(pattern)
        return None if name is None else self.plan.layout(name)

    def local_shape(self, name: str, layout: Layout) -> tuple[int, ...]:
        return local_shape(self.graph.tensors[name].shape, layout, self.axes, self.coordinates)

    def input_layout(self, name: str) -> Layout:
        """A graph input: each rank gets its samples, or all of what belongs to no sample."""
        return parsed({"dp": "S(0)"}) if name in self.graph.batch_inputs else {}


def where(graph: Graph, plan: Plan, stage: int, rank: int) -> Where:
    """Stage `stage` on global `rank`."""
    found = plan.stages[stage]
    at = found.coordinates(rank)
    axes = found.axes(plan.global_batch_size)
    return Where(graph, plan, stage, axes, {axis: at[axis] for axis in axes})


def parsed(placements: dict[str, str]) -> Layout:
    """Axis -> placement text, parsed."""
    return {axis: parse_placement(text) for axis, text in placements.items()}


def strategies(layout: BlockLayout | None, op: Op) -> dict[str, Strategy]:
    """Axis -> strategy of an op; an axis that is absent means all replicated."""
    texts = layout.ops.get(op.key, {}) if layout else {}
    return {axis: parse_strategy(text) for axis, text in texts.items()}


def same(layout: Layout, other: Layout) -> bool:
    """Whether two layouts are equal; an axis not named is Replicate."""
    return all(layout.get(axis, R) == other.get(axis, R) for axis in layout.keys() | other.keys())


def label_of(graph: Graph, block: Block) -> Callable[[str], str]:
    """What readers call the tensors of all blocks of the block's pattern."""

    def label(name: str) -> str:
        tensor = graph.tensors[name]
        if tensor.fqn:
            key = param_key(block, tensor.fqn)
            return tensor.fqn if key == tensor.fqn else f"{block.pattern}.{key}"
        for op in graph.block_ops(block):
            if name in op.outputs:
                return f"{block.pattern}.{op.key}"
        return f"{block.pattern} input {name}"

    return label
