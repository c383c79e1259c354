"""A whole mixture of expert MLPs as one op: split tokens, experts, the inner dim of each, or tokens
and experts together, so that tokens travel."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, gcd

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf
from meshwright.ir.graph.op_forms import (
    index_of,
    only_axis,
    own_part,
    run_sizes,
    sharded,
    splitting,
    then,
)
from meshwright.ir.graph.op_site import Form, OpSite, Value
from meshwright.ir.graph.rules import Rule, input_shapes, make_rule
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.op_messages import Inner, Operands, copies_of


def _rule(op: Op, graph: Graph) -> Rule | None:
    """hidden[t, h] index[t, k] weights[t, k] gate_up[e, 2 i, h] down[e, h, i] -> [t, h]."""
    _, index, _, gate_up, down = input_shapes(op, graph)[:5]
    inner = down[2]
    sizes = {"two": gate_up[1] // inner, "i": inner}
    gates = ("two",) * (sizes["two"] > 1) + ("i",)
    inputs = [
        (("t",), ("h",)),
        (("t",), ("k",)),
        (("t",), ("k",)),
        (("e",), gates, ("h",)),
        (("e",), ("h",), ("i",)),
    ]
    whole = {"two", "h", "k"}
    return make_rule(
        op, graph, inputs, [(("t",), ("h",))], sizes=sizes, whole=whole, plain="e",
        together={"route": ("t", "e")}, loose="t",
    ) if len(index) == 2 else None  # fmt: skip


def _own(site: OpSite, form: Form) -> Form:
    own = own_part(site, index_of(form, "gate_up"), 0)
    return sharded(form, "experts", start=own["start"]) if own else form


def _routed(site: OpSite, form: Form) -> Form:
    """Tokens may be split in any way: they only travel."""
    tokens, experts = splitting(site, 0, 0), splitting(site, 3, 0)
    if not set(tokens) & set(experts):
        return form
    axis = only_axis(site, 0, experts)
    shard = site.input_layout(3)[axis]
    assert isinstance(shard, Shard)
    extra: dict[str, Value] = {"axis": axis}
    extra["experts"] = run_sizes(site, axis, site.input(3).shape[0], shard)
    return replace(
        form, args=(*site.arguments().items(), *extra.items()), target="sharded.routed_experts"
    )


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Every token through its `k` experts: gate and up, then down."""
    tokens, k = of(args.get("top_k_index"))
    _, double, hidden = of(args.get("gate_up"))
    return 2 * tokens * k * hidden * (double + double // 2)


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Tokens travel to the ranks of their experts and back, once to each rank; balanced routing.

    In backward the gradient of the result goes there, that of the tokens comes back.
    """
    hidden, index, weights = inputs[:3]
    if not (isinstance(strategy.inputs[0], Shard) and isinstance(strategy.inputs[3], Shard)):
        return ()
    if strategy.inputs[0].dim != 0 or strategy.inputs[3].dim != 0:
        return ()
    picked, held = index.shape[-1], max(1, inputs[3].shape[0] // ranks)
    copies = copies_of(ranks, picked)
    tokens, scales, indices = (ceil(o.nbytes * copies) for o in (hidden, weights, index))
    move = Primitive.ALL_TO_ALL
    return (
        Inner(move, 8 * ranks * ranks, 1, backward=False),
        Inner(move, tokens, 2, backward=False, picked=picked, held=held),
        Inner(move, scales, 1, backward=False),
        Inner(move, indices, 1, backward=False),
        Inner(move, tokens, 2, backward=True, picked=picked, held=held),
        Inner(move, scales, 1, backward=True),
    )


def _copies(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> dict[int, int]:
    copies = copies_of(ranks, inputs[1].shape[-1])
    return {i: ceil(inputs[i].nbytes * copies / ranks) for i in range(3)}


def _products(shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """Gate and up in one product, then down, for each expert of this rank."""
    whole = [shape for shape in shapes if len(shape) == 3]
    if len(whole) != 2:
        return ()
    (count, double, hidden), inner = whole[0], whole[0][1] // 2
    per_row = 2 * hidden * (double + inner)
    if not count * per_row:
        return ()
    rows = max(1, round(flops / per_row / count))
    row = gcd(hidden, inner)
    return Gemm(count, rows, double, hidden, row), Gemm(count, rows, hidden, inner, row)


FACTS = {
    "meshwright.experts": OpFacts(
        op_class=OpClass.MATMUL,
        rule=_rule,
        flops=_flops,
        products=_products,
        form=then(_own, _routed),
        messages=_messages,
        copies=_copies,
    )
}
