"""Picks a strategy for every op: the batch on `dp` first, then `tp` on what dp leaves whole.

Equal blocks are solved once. Parameters that several patterns share get the one placement that is
cheapest for all of them together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.ir.graph import Block, Graph, Kind
from meshwright.ir.layout import RP, P, Placement, R, Replicate, Shard
from meshwright.ir.plan import BlockLayout, param_key
from meshwright.planner.axis_layout import Laid, lay_out, stored_choices
from meshwright.planner.factors import AxisKind, Split
from meshwright.planner.prices import AlphaBeta, DataPrices, Prices
from meshwright.planner.segments import PRELUDE, Segment, aliases, segments
from meshwright.planner.spread import spread

COUPLING = DataPrices()

Labels = Callable[[str], Placement]
"""Placement of a value at a block border."""


@dataclass(frozen=True, slots=True)
class DataLayout:
    """The dp axis of all segments; independent of its size."""

    segments: tuple[Segment, ...]
    laid: tuple[Laid, ...]
    splits: dict[str, tuple[Split, ...]]
    """Per op name."""
    label: Labels


def solve_layouts(graph: Graph, tp: int, prices: Prices | None = None) -> tuple[BlockLayout, ...]:
    """One layout per pattern, the prelude first."""
    data = solve_data(graph)
    tensor = solve_tensor(graph, data, tp, prices or AlphaBeta()) if tp > 1 else None
    return tuple(
        _assemble(graph, segment, data, laid, tensor[i] if tensor else None, tp)
        for i, (segment, laid) in enumerate(zip(data.segments, data.laid, strict=True))
    )


def solve_data(graph: Graph) -> DataLayout:
    """The dp axis: the batch dim wherever it goes."""
    found, alias = segments(graph), aliases(graph)
    axis = AxisKind(1, graph.batch_size)
    seeds = {name: [Shard(0)] for name in graph.batch_inputs if graph.batch_size > 1}
    ops = [op for segment in found for op in segment.ops]
    rules = {name: rule for segment in found for name, rule in segment.rules.items()}
    splits, shards = spread(
        ops, rules, axis, taken={}, seeds=seeds, natural=False,
        barred=lambda name: is_state(graph, name), alias=alias,
    )  # fmt: skip
    roots = {alias(name): min(kept, key=str) for name, kept in shards.items() if kept}

    def label(name: str) -> Placement:
        if name == graph.loss:
            return P
        return roots.get(alias(name)) or (RP if graph.tensors[name].requires_grad else R)

    laid = tuple(_lay_data(graph, segment, axis, splits, label) for segment in found)
    return DataLayout(found, laid, splits, label)


def _lay_data(
    graph: Graph,
    segment: Segment,
    axis: AxisKind,
    splits: Mapping[str, tuple[Split, ...]],
    label: Labels,
) -> Laid:
    block = segment.block
    given = {name: ((label(name), 0),) for name in block.inputs}
    for name in block.params:
        given[name] = ((RP if graph.tensors[name].requires_grad else R, 0),)
    exits = {name: label(name) for name in results(graph, block)}
    return lay_out(graph, segment, axis, splits, given, exits, COUPLING)


def solve_tensor(
    graph: Graph, data: DataLayout, tp: int, prices: Prices
) -> tuple[Laid | None, ...]:
    """The tp axis of each segment; None for the prelude, which every rank computes whole."""
    axis = AxisKind(tp)
    parts = [
        _TensorPart.of(graph, segment, laid, axis, prices)
        for segment, laid in zip(data.segments, data.laid, strict=True)
        if segment.block.pattern != PRELUDE
    ]
    pins: dict[str, Placement] = {}
    for name in _shared(graph, parts):
        users = [part for part in parts if name in part.segment.block.params]
        options = dict.fromkeys(p for part in users for p, _ in part.given[name])
        pins[name] = min(
            options, key=lambda p: sum(part.lay({**pins, name: p}).cost for part in users)
        )
    solved = iter([part.lay(pins) for part in parts])
    return tuple(None if s.block.pattern == PRELUDE else next(solved) for s in data.segments)


def _shared(graph: Graph, parts: list["_TensorPart"]) -> list[str]:
    """Parameters that several patterns read, largest first."""
    users: dict[str, int] = {}
    for part in parts:
        for name in part.segment.block.params:
            if graph.tensors[name].kind is Kind.PARAMETER:
                users[name] = users.get(name, 0) + 1
    found = [name for name, count in users.items() if count > 1]
    return sorted(found, key=lambda name: (-graph.tensors[name].nbytes, name))


@dataclass(frozen=True, slots=True)
class _TensorPart:
    """A segment prepared for the tp axis."""

    graph: Graph
    segment: Segment
    axis: AxisKind
    splits: Mapping[str, tuple[Split, ...]]
    given: Mapping[str, tuple[tuple[Placement, int], ...]]
    prices: Prices

    @classmethod
    def of(
        cls, graph: Graph, segment: Segment, data: Laid, axis: AxisKind, prices: Prices
    ) -> "_TensorPart":
        splits, shards = spread(
            segment.ops, segment.rules, axis,
            taken=taken_dims(segment, data), seeds={}, natural=True,
            barred=lambda name: is_state(graph, name, parameters=False),
        )  # fmt: skip
        block = segment.block
        given: dict[str, tuple[tuple[Placement, int], ...]] = {n: ((R, 0),) for n in block.inputs}
        for name in block.params:
            found = tuple(shards.get(name, ()))
            given[name] = stored_choices(graph, name, found, axis.size, prices)
        return cls(graph, segment, axis, splits, given, prices)

    def lay(self, pins: Mapping[str, Placement]) -> Laid:
        """The layout with some parameters in fixed placements."""
        given = dict(self.given)
        for name in pins.keys() & given.keys():
            costs = dict(given[name])
            given[name] = ((pins[name], costs.get(pins[name], 0)),)
        exits: dict[str, Placement] = dict.fromkeys(results(self.graph, self.segment.block), R)
        return lay_out(self.graph, self.segment, self.axis, self.splits, given, exits, self.prices)


def taken_dims(segment: Segment, data: Laid) -> dict[str, frozenset[int]]:
    """Dims that dp splits, of each value of the segment."""
    found: dict[str, set[int]] = {}
    for name, placement in data.placed.items():
        if isinstance(placement, Shard):
            found.setdefault(name, set()).add(placement.dim)
    for op in segment.ops:
        strategy = data.strategies[op.name]
        names, places = (*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs)
        for name, placement in zip(names, places, strict=True):
            if isinstance(placement, Shard):
                found.setdefault(name, set()).add(placement.dim)
    return {name: frozenset(dims) for name, dims in found.items()}


def results(graph: Graph, block: Block) -> tuple[str, ...]:
    """The values that leave a block, the loss included."""
    made = {out for op in graph.block_ops(block) for out in op.outputs}
    loss = (graph.loss,) if graph.loss in made - set(block.outputs) else ()
    return tuple(dict.fromkeys((*block.outputs, *loss)))


def is_state(graph: Graph, name: str, parameters: bool = True) -> bool:
    """Whether a tensor is a buffer or constant (or parameter): its placement is not the batch's."""
    kind = graph.tensors[name].kind
    return kind in (Kind.BUFFER, Kind.CONSTANT) or (parameters and kind is Kind.PARAMETER)


def _assemble(
    graph: Graph, segment: Segment, data: DataLayout, dp: Laid, tp: Laid | None, size: int
) -> BlockLayout:
    """The layouts of both axes as texts; what is replicated is left out."""
    block = segment.block
    ops: dict[str, dict[str, str]] = {}
    for op in segment.ops:
        texts = {
            axis: str(laid.strategies[op.name])
            for axis, laid in (("dp", dp), ("tp", tp))
            if laid
            and any(p != R for s in [laid.strategies[op.name]] for p in s.inputs + s.outputs)
        }
        if texts:
            ops[op.key] = texts
    parameters: dict[str, dict[str, str]] = {}
    for name in block.params:
        tensor = graph.tensors[name]
        if tensor.kind is Kind.PARAMETER:
            stored = {
                "dp": RP if tensor.requires_grad else R,
                "tp": tp.placed.get(name, R) if tp else R,
            }
            parameters[param_key(block, tensor.fqn)] = {
                a: str(p) for a, p in stored.items() if p != R
            }
    return BlockLayout(
        name=f"{block.pattern} tp{size}",
        pattern=block.pattern,
        mesh={"tp": size} if size > 1 else {},
        parameters=parameters,
        inputs=tuple(_border(data.label(name)) for name in block.inputs),
        outputs=tuple(_border(data.label(name)) for name in block.outputs),
        ops=ops,
    )


def _border(placement: Placement) -> dict[str, str]:
    """On tp values are whole at borders."""
    whole = isinstance(placement, Replicate) and not placement.partial_grad
    return {} if whole else {"dp": str(placement)}
