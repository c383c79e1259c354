"""Lays out one segment on one axis: what each op may do, what it costs, and the cheapest of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.ops.op_classes import is_view, looks_up
from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.layout.conversions import Conversion
from meshwright.ir.layout.layout import (
    RP,
    Partial,
    Placement,
    Shard,
    Strategy,
    units_of,
)
from meshwright.planner.inside.factors import AxisKind, Split, strategies
from meshwright.planner.inside.frontier import OpChain, OpCosts, Solution, solve
from meshwright.planner.inside.inside_prices import inside_s
from meshwright.planner.inside.prices import Prices
from meshwright.planner.inside.segments import LayoutSegment

PICOSECONDS = 1e12
MICROBATCHES = 8
"""How many micro-batches a step is assumed to have: each converts the parameters again, while
storing them counts once."""


@dataclass(frozen=True, slots=True)
class LaidSegment:
    """One segment on one axis."""

    cost: int
    strategies: dict[str, Strategy]
    """Per op name."""
    placed: dict[str, Placement]
    """Params and inputs that it reads."""


Given = Mapping[str, tuple[tuple[Placement, int], ...]]


def lay_out(
    graph: Graph,
    segment: LayoutSegment,
    axis: AxisKind,
    splits: Mapping[str, tuple[Split, ...]],
    given: Given,
    exits: Mapping[str, Placement],
    prices: Prices,
) -> LaidSegment:
    """The cheapest layout of the segment."""
    ranks = max(axis.size, 2)
    choices = _choices(graph, segment, axis, splits, given, exits)
    steps = tuple(
        OpCosts(
            op.inputs,
            op.outputs,
            found,
            tuple(_op_cost(graph, op, strategy, axis, prices) for strategy in found),
        )
        for op, found in zip(segment.ops, choices, strict=True)
    )
    solution: Solution = solve(OpChain(steps, given, exits, _price(graph, ranks, prices)))
    chosen = {op.name: s for op, s in zip(segment.ops, solution.chosen, strict=True)}
    return LaidSegment(solution.cost, chosen, solution.placed)


def _choices(
    graph: Graph,
    segment: LayoutSegment,
    axis: AxisKind,
    splits: Mapping[str, tuple[Split, ...]],
    given: Given,
    exits: Mapping[str, Placement],
) -> list[tuple[Strategy, ...]]:
    every = {
        op.name: strategies(op, segment.rules[op.name], graph, axis, splits[op.name])
        for op in segment.ops
    }
    summed = {n for n, found in given.items() if any(isinstance(p, Partial) for p, _ in found)}
    wanted = {name for name, placement in exits.items() if placement == RP}
    kept = useful(segment, every, summed, wanted)
    return [kept[op.name] for op in segment.ops]


def useful(
    segment: LayoutSegment,
    every: Mapping[str, Sequence[Strategy]],
    summed: set[str],
    wanted: set[str],
) -> dict[str, tuple[Strategy, ...]]:
    """Strategies per op, without summands that cannot arise and gradients that nobody makes.

    `summed`: values that may come as summands; `wanted`: results whose gradients may be summands.
    """
    summed, wanted, kept = set(summed), set(wanted), dict[str, tuple[Strategy, ...]]()
    for op in segment.ops:
        kept[op.name] = tuple(s for s in every[op.name] if _arises(op, s, summed))
        summed |= {
            name
            for s in kept[op.name]
            for name, p in zip(op.outputs, s.outputs, strict=True)
            if isinstance(p, Partial)
        }
    for op in reversed(segment.ops):
        kept[op.name] = tuple(s for s in kept[op.name] if _wanted(op, s, wanted))
        wanted |= {
            name
            for s in kept[op.name]
            for name, p in zip(op.inputs, s.inputs, strict=True)
            if p == RP
        }
    return kept


def _arises(op: Op, strategy: Strategy, summed: set[str]) -> bool:
    """A linear pass of summands needs an input that can be one."""
    linear = any(isinstance(p, Partial) for p in strategy.inputs)
    if not linear or any(isinstance(p, Shard) for p in strategy.inputs):
        return True
    return any(
        isinstance(p, Partial) and name in summed
        for name, p in zip(op.inputs, strategy.inputs, strict=True)
    )


def _wanted(op: Op, strategy: Strategy, wanted: set[str]) -> bool:
    """Passing partial gradients back needs a reader that gives some."""
    if RP not in strategy.outputs:
        return True
    return any(p == RP and n in wanted for n, p in zip(op.outputs, strategy.outputs, strict=True))


def _op_cost(graph: Graph, op: Op, strategy: Strategy, axis: AxisKind, prices: Prices) -> int:
    """Forward and backward, on the rank with most to do."""
    ranks = max(axis.size, 2)
    if is_view(op.target):
        return 0
    made = sum(sample_bytes(graph, name) for name in op.outputs if name)
    read = made if looks_up(op.target) else sum(sample_bytes(graph, n) for n in op.inputs)
    passes = 3 if any(n and graph.tensors[n].requires_grad for n in op.outputs) else 1
    share = strategy_share(graph, op, strategy, ranks)
    computing_s = prices.op_s(op.flops * passes / graph.batch_size, (made + read) * passes) * share
    # On dp a split batch is meant to be: what couples its samples is priced as conversions are.
    inside = inside_s(graph, op, strategy, 1 if axis.batch else ranks, prices)
    return round(inside.with_compute(computing_s) * PICOSECONDS)


def sample_bytes(graph: Graph, name: str) -> int:
    """Bytes of a value for one sample; those of what is stored are needed for each micro-batch.

    Layouts are priced for micro-batches of one sample per rank: so they do not depend on how the
    batch is cut, and parameters weigh what they do where memory is short.
    """
    tensor = graph.tensors[name]
    stored = tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
    return tensor.nbytes if stored else -(-tensor.nbytes // graph.batch_size)


def strategy_share(graph: Graph, op: Op, strategy: Strategy, ranks: int) -> float:
    """What part of the op the busiest of `ranks` does."""
    names = (*op.outputs, *op.inputs)
    for name, placement in zip(names, (*strategy.outputs, *strategy.inputs), strict=True):
        if isinstance(placement, Shard) and name:
            return shard_share(graph, name, placement, ranks)
    return 1.0


def shard_share(graph: Graph, name: str, placement: Placement, ranks: int) -> float:
    """What part of a value the rank with most of it holds."""
    if not isinstance(placement, Shard):
        return 1.0
    units = units_of(graph.tensors[name].shape[placement.dim], placement)
    return -(-units // ranks) / units


def _price(graph: Graph, ranks: int, prices: Prices) -> Callable[[str, Placement, Placement], int]:
    """Price of a conversion, forward and (if a gradient flows) backward."""
    known: dict[tuple[str, Placement, Placement], int] = {}

    def price(name: str, source: Placement, target: Placement) -> int:
        key = (name, source, target)
        if key not in known:
            tensor, conversion = graph.tensors[name], Conversion(source, target)
            nbytes = sample_bytes(graph, name)
            seconds = prices.primitive_s(conversion.forward, nbytes, ranks)
            if tensor.requires_grad:
                seconds += prices.primitive_s(conversion.backward, nbytes, ranks)
            times = MICROBATCHES if tensor.kind is Kind.PARAMETER else 1
            known[key] = round(seconds * times * PICOSECONDS)
        return known[key]

    return price
