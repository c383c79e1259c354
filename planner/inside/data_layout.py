"""The dp axis: the batch dim wherever it goes; independent of how many ranks share it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lcm

from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.layout.layout import RP, P, Placement, R, Shard
from meshwright.ir.memo import Memos
from meshwright.planner.inside.axis_layout import LaidSegment, lay_out
from meshwright.planner.inside.candidate_splits import spread
from meshwright.planner.inside.factors import AxisKind, Split
from meshwright.planner.inside.prices import DataPrices
from meshwright.planner.inside.segments import LayoutSegment, aliases, segments

COUPLING = DataPrices()

Labels = Callable[[str], Placement]
"""Placement of a value at a block border."""


@dataclass(frozen=True, slots=True)
class DataLayout:
    """The dp axis of all segments."""

    segments: tuple[LayoutSegment, ...]
    laid: tuple[LaidSegment, ...]
    splits: dict[str, tuple[Split, ...]]
    """Per op name."""
    label: Labels
    memos: Memos = field(default_factory=Memos, compare=False, repr=False)
    """What meshes have in common."""


def solve_data(graph: Graph) -> DataLayout:
    """The cheapest layout of the samples."""
    found, alias = segments(graph), aliases(graph)
    axis = AxisKind(1, graph.batch_size)
    seeds = {name: [Shard(0)] for name in graph.batch_inputs if graph.batch_size > 1}
    ops = [op for segment in found for op in segment.ops]
    rules = {name: rule for segment in found for name, rule in segment.rules.items()}
    splits, shards = spread(
        ops, rules, axis, taken={}, seeds=seeds, natural=lambda op: False,
        barred=lambda name: is_state(graph, name), alias=alias,
    )  # fmt: skip
    roots = {alias(name): min(kept, key=str) for name, kept in shards.items() if kept}

    def label(name: str) -> Placement:
        if name == graph.loss:
            return P
        return roots.get(alias(name)) or (RP if graph.tensors[name].requires_grad else R)

    laid = tuple(_lay(graph, segment, axis, splits, label) for segment in found)
    return DataLayout(found, laid, splits, label)


def _lay(
    graph: Graph,
    segment: LayoutSegment,
    axis: AxisKind,
    splits: Mapping[str, tuple[Split, ...]],
    label: Labels,
) -> LaidSegment:
    block = segment.block
    given = {name: ((label(name), 0),) for name in block.inputs}
    for name in block.params:
        given[name] = ((RP if graph.tensors[name].requires_grad else R, 0),)
    exits = {name: label(name) for name in results(graph, block)}
    return lay_out(graph, segment, axis, splits, given, exits, COUPLING)


def taken_dims(segment: LayoutSegment, data: LaidSegment, batch: int) -> dict[str, dict[int, int]]:
    """Dims that dp splits, of each value of the segment, and the parts that others split inside."""
    found: dict[str, dict[int, int]] = {}

    def take(name: str, placement: Placement) -> None:
        if isinstance(placement, Shard):
            dims = found.setdefault(name, {})
            dims[placement.dim] = lcm(dims.get(placement.dim, 1), placement.outer * batch)

    for name, placement in data.placed.items():
        take(name, placement)
    for op in segment.ops:
        strategy = data.strategies[op.name]
        names, places = (*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs)
        for name, placement in zip(names, places, strict=True):
            take(name, placement)
    return found


def results(graph: Graph, block: Block) -> tuple[str, ...]:
    """The values that leave a block, the loss included."""
    made = {out for op in graph.block_ops(block) for out in op.outputs}
    loss = (graph.loss,) if graph.loss in made - set(block.outputs) else ()
    return tuple(dict.fromkeys((*block.outputs, *loss)))


def is_state(graph: Graph, name: str, parameters: bool = True) -> bool:
    """Whether a tensor is a buffer or constant (or parameter): its placement is not the batch's."""
    kind = graph.tensors[name].kind
    return kind in (Kind.BUFFER, Kind.CONSTANT) or (parameters and kind is Kind.PARAMETER)
