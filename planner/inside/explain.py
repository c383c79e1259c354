"""What a layout means for people: its communication, what couples samples, what stays whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.ir.graph.graph import Block, Graph, Op
from meshwright.ir.graph.prelude import PRELUDE, prelude_block
from meshwright.ir.graph.rules import name_of
from meshwright.ir.layout.conversions import COMMUNICATES, Conversion, Primitive
from meshwright.ir.layout.layout import (
    Placement,
    R,
    Shard,
    Strategy,
    parse_placement,
    parse_strategy,
)
from meshwright.ir.ops import facts
from meshwright.ir.plan.plan import BlockLayout, param_key
from meshwright.planner.inside.factors import AxisKind, natural_splits
from meshwright.planner.strategies import find_rule


@dataclass(frozen=True, slots=True)
class ExplainedMove:
    """One conversion of a value in a block."""

    value: str
    conversion: Conversion
    op: Op | None
    """The first op that needs it; None for the block's own outputs."""
    has_gradient: bool

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """Forward, and backward if a gradient flows."""
        both = (self.conversion.forward, self.conversion.backward)
        return both if self.has_gradient else both[:1]

    @property
    def communicates(self) -> bool:
        return any(primitive in COMMUNICATES for primitive in self.primitives)


def moves(graph: Graph, block: Block, layout: BlockLayout, axis: str) -> tuple[ExplainedMove, ...]:
    """The conversions that a block needs on one axis, each (value, target) once."""
    placed = _entry(graph, block, layout, axis)
    found: dict[tuple[str, Placement], ExplainedMove] = {}

    def need(name: str, target: Placement, op: Op | None) -> None:
        source = placed.get(name, R)
        if source != target and (name, target) not in found:
            grad = graph.tensors[name].requires_grad
            found[name, target] = ExplainedMove(name, Conversion(source, target), op, grad)

    for op in graph.block_ops(block):
        strategy = strategy_of(op, layout, axis)
        for name, target in zip(op.inputs, strategy.inputs, strict=True):
            need(name, target, op)
        for name, source in zip(op.outputs, strategy.outputs, strict=True):
            placed[name] = source
    for name, axes in zip(block.outputs, layout.outputs, strict=True):
        need(name, parse_placement(axes.get(axis, "R")), None)
    return tuple(found.values())


def strategy_of(op: Op, layout: BlockLayout, axis: str) -> Strategy:
    """The op's strategy on an axis; all R where the layout says nothing."""
    text = layout.ops.get(op.key, {}).get(axis)
    return parse_strategy(text) if text else Strategy((R,) * len(op.inputs), (R,) * len(op.outputs))


def _entry(graph: Graph, block: Block, layout: BlockLayout, axis: str) -> dict[str, Placement]:
    placed: dict[str, Placement] = {
        name: parse_placement(axes.get(axis, "R"))
        for name, axes in zip(block.inputs, layout.inputs, strict=True)
    }
    for name in block.params:
        fqn = graph.tensors[name].fqn
        axes = layout.parameters.get(param_key(block, fqn), {}) if fqn else {}
        placed[name] = parse_placement(axes.get(axis, "R"))
    return placed


def batch_coupling(
    graph: Graph, layouts: Sequence[BlockLayout], *, sums: bool = True
) -> tuple[str, ...]:
    """Why samples of a step depend on each other so that micro-batches would change the result.

    Empty if they do not. Sums in the prelude are totals over all micro-batches and couple nothing.
    Without `sums`, neither do those of blocks, which replicas that train alone have of their own.
    """
    by_pattern = {layout.pattern: layout for layout in layouts}
    found: list[str] = []
    for block in (prelude_block(graph), *graph.distinct_blocks()):
        for move in moves(graph, block, by_pattern[block.pattern], "dp"):
            if _couples(graph, block, move) and (sums or not _is_sum(move)):
                found.append(_coupled(graph, block, move))
    return tuple(dict.fromkeys(found))


def _couples(graph: Graph, block: Block, move: ExplainedMove) -> bool:
    forward = move.conversion.forward
    if block.pattern == PRELUDE and forward is Primitive.ALL_REDUCE:
        return False
    return move.communicates


def _is_sum(move: ExplainedMove) -> bool:
    sent = COMMUNICATES.intersection(move.primitives)
    return sent == {Primitive.ALL_REDUCE}


def _coupled(graph: Graph, block: Block, move: ExplainedMove) -> str:
    producer = graph.producer.get(move.value)
    if move.op:
        place = f"{move.op.target} needs {move.value} {move.conversion.target}"
    else:
        place = f"{block.pattern} hands on {move.value} {move.conversion.target}"
    source = next((op.source for op in (move.op, producer) if op and op.source), "unknown source")
    return (
        f"{block.pattern}: {place}, which is {move.conversion.source} on dp ({source}): the whole "
        f"batch must be there at once{_LATER if not move.op and _is_sum(move) else ''}"
    )


_LATER = (
    "; a term of the loss, such as a router's z-loss, may be summed at the end of forward, of what "
    "blocks hand on (docs/limits.md)"
)
"""What helps where a block hands on a sum over samples."""


def batch_norms(graph: Graph) -> tuple[str, ...]:
    """Notes on ops whose statistics are those of a micro-batch."""
    found = [op for op in graph.ops if facts(op.target).mixes_samples and _trains(op)]
    if not found:
        return ()
    return (
        f"{len(found)} batch-norm ops, the first at {found[0].source or found[0].module_path}: "
        f"statistics are those of a micro-batch over all its dp ranks, so num_microbatches matters",
    )


def _trains(op: Op) -> bool:
    return dict(op.args).get("training") is True


def why_whole(graph: Graph, layouts: Sequence[BlockLayout]) -> tuple[str, ...]:
    """For each pattern, its layouts and their axes: what heavy work the axis does not split, and
    why."""
    return tuple(
        text
        for block in graph.distinct_blocks()
        for layout in layouts
        if layout.pattern == block.pattern
        for axis, size in layout.model
        for text in _whole(graph, block, layout, axis, size)
    )


def _whole(graph: Graph, block: Block, layout: BlockLayout, axis: str, size: int) -> Iterator[str]:
    ops = graph.block_ops(block)
    splits = {op.name for op in ops if _is_split(strategy_of(op, layout, axis))}
    heavy = max(sum(op.flops for op in ops) / 10, graph.flops / 100)
    reported: set[str] = set()
    for op in sorted(ops, key=lambda op: -op.flops):
        counts = not splits or op.flops > heavy
        if op.name not in splits and counts and name_of(op) not in reported:
            reported.add(name_of(op))
            where = f"{block.pattern}: {op.module_path or op.key}"
            yield (
                f"{axis}={size}: {where}: {name_of(op)} is computed whole on each rank: "
                f"{_reason(graph, op, layout, size)}"
            )
            if not splits:
                return


def _is_split(strategy: Strategy) -> bool:
    return any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))


def _reason(graph: Graph, op: Op, layout: BlockLayout, size: int) -> str:
    rule = find_rule(op, graph)
    if rule is None:
        return "it has no rule"
    data = strategy_of(op, layout, "dp")
    names, places = (*op.inputs, *op.outputs), (*data.inputs, *data.outputs)
    taken = {
        name: {p.dim: p.outer * graph.batch_size}
        for name, p in zip(names, places, strict=True)
        if isinstance(p, Shard)
    }
    if any(natural_splits(op, rule, AxisKind(size), taken)):
        return "splitting it would cost more than it saves"
    if not any(natural_splits(op, rule, AxisKind(2), taken)):
        return "it has no rule besides its batch"
    return f"none of its dims has {size} units to split"
