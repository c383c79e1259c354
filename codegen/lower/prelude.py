"""The part of the prelude that a stage needs, and the totals that must be known before it.

A total is a value that the prelude sums over the data axis, such as the number of valid tokens. It
spans all micro-batches, so its summands are computed and added up before the first of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.codegen.lower.builder import Builder
from meshwright.codegen.lower.program import TOTALS, BlockCode, Call
from meshwright.codegen.lower.stage_context import Where, strategies
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Kind, Op
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.layout.layout import Layout, P, Partial, Placement, R, Shard
from meshwright.ir.plan.plan import BlockLayout


@dataclass(frozen=True)
class Prelude:
    """What a stage runs before its blocks."""

    totals: Call | None = None
    call: Call | None = None
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Placement of each value it makes."""


def lower_prelude(where: Where, wanted: tuple[str, ...]) -> Prelude:
    """Calls that make the `wanted` values of the prelude."""
    if not wanted:
        return Prelude()
    layout = where.layout(PRELUDE)
    made = {
        name: _made(where, layout, name) for op in where.graph.prelude_ops for name in op.outputs
    }
    totals = _totals(where, layout, wanted, made)
    layouts = {name: _kept(made[name]) for name in wanted}
    first: dict[str, Layout] = {name: {"dp": P} for name in totals}
    call = _call(where, layout, layouts, known=totals, name=PRELUDE)
    summands = _call(where, layout, first, known=(), name=TOTALS) if totals else None
    return Prelude(summands, call, layouts)


def _made(where: Where, layout: BlockLayout | None, name: str) -> Layout:
    if not name:
        return {}
    op = where.graph.producer[name]
    found = strategies(layout, op)
    return {axis: strategy.outputs[op.outputs.index(name)] for axis, strategy in found.items()}


def _kept(layout: Layout) -> Layout:
    """Values leave the prelude whole on tp, and whole or by sample on dp."""
    batch: Placement = layout.get("dp", R)
    return {"dp": batch if isinstance(batch, Shard) else R}


def _needed_ops(where: Where, wanted: Iterable[str], known: Iterable[str]) -> tuple[Op, ...]:
    """The prelude ops that make `wanted`, given `known`."""
    needed, ops = set(wanted) - set(known), []
    for op in reversed(where.graph.prelude_ops):
        if needed & set(op.outputs):
            ops.append(op)
            needed |= set(op.inputs) - set(known)
    return tuple(reversed(ops))


def _totals(
    where: Where, layout: BlockLayout | None, wanted: tuple[str, ...], made: dict[str, Layout]
) -> tuple[str, ...]:
    """Values made as summands on dp that are needed otherwise."""

    def is_summand(name: str) -> bool:
        return isinstance(made.get(name, {}).get("dp", R), Partial)

    found = [name for name in wanted if is_summand(name)]
    for op in _needed_ops(where, wanted, ()):
        strategy = strategies(layout, op).get("dp")
        for i, name in enumerate(op.inputs):
            needs_sum = strategy is None or not isinstance(strategy.inputs[i], Partial)
            if is_summand(name) and needs_sum:
                found.append(name)
    for name in found:
        behind = {out for op in _needed_ops(where, [name], ()) for out in op.inputs}
        if behind & set(found):
            raise PlanError(f"{name}: a total over the batch that depends on another total")
    return tuple(dict.fromkeys(found))


def _call(
    where: Where,
    layout: BlockLayout | None,
    outputs: dict[str, Layout],
    known: tuple[str, ...],
    name: str,
) -> Call | None:
    """One module that makes `outputs` from graph inputs, constants and `known` totals."""
    graph = where.graph
    pending = {name: placed for name, placed in outputs.items() if name not in known}
    if not pending:
        return None
    ops = _needed_ops(where, pending, known)
    made = {out for op in ops for out in op.outputs}
    read = dict.fromkeys(n for op in ops for n in op.inputs if n not in made)
    is_param = {
        n: graph.tensors[n].kind in (Kind.BUFFER, Kind.CONSTANT, Kind.PARAMETER) for n in read
    }
    params = tuple(n for n in read if is_param[n])
    inputs = tuple(n for n in read if not is_param[n])
    builder = Builder(graph, where.axes, where.coordinates, lambda n: f"{PRELUDE}.{n}")
    for param in params:
        builder.add_placeholder(param, {})
    for value in inputs:
        builder.add_placeholder(value, {} if value in known else where.input_layout(value))
    for op in ops:
        builder.add_op(op, strategies(layout, op))
    module = builder.finish(tuple(pending.items()))
    return Call(name, BlockCode(name, module), params, inputs, tuple(pending))
