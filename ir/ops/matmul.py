"""Matrix products: split rows, columns, batches, or the contracted dim (which gives sums)."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.gemm import matrix_products
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    aligned,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
)


def _linear(op: Op, graph: Graph) -> Rule:
    """x[..., k] w[n, k] (bias[n]) -> [..., n]."""
    x = input_shapes(op, graph)[0]
    weight: Dims = (("n",), ("k",)) if len(input_shapes(op, graph)[1]) == 2 else (("k",),)
    out = (*letters("m", len(x) - 1), *weight[:-1])
    inputs = [(*letters("m", len(x) - 1), ("k",)), weight, (("n",),)][: len(op.inputs)]
    added = [2] if len(op.inputs) > 2 else []
    linear = [{0, *added}, {1, *added}]
    return make_rule(op, graph, inputs, [out], added=added, linear=linear)


def _product(op: Op, graph: Graph) -> Rule:
    """Two operands, with torch's broadcasting of batch dims and vectors."""
    left, right = input_shapes(op, graph)
    a, b, out = _operands(left, right, len(output_shapes(op, graph)[0]))
    return make_rule(op, graph, [a, b], [out], linear=[{0}, {1}])


def _added_product(op: Op, graph: Graph) -> Rule:
    """addmm, baddbmm, addmv: the first operand is broadcast and added."""
    base, left, right = input_shapes(op, graph)
    a, b, out = _operands(left, right, len(output_shapes(op, graph)[0]))
    inputs = [aligned(out, len(base)), a, b]
    return make_rule(op, graph, inputs, [out], added=[0], linear=[{0, 1}, {0, 2}])


def _outer(op: Op, graph: Graph) -> Rule:
    return make_rule(op, graph, [(("m",),), (("n",),)], [(("m",), ("n",))], linear=[{0}, {1}])


def _operands(a: tuple[int, ...], b: tuple[int, ...], rank: int) -> tuple[Dims, Dims, Dims]:
    rows: Dims = (("m",),) if len(a) > 1 else ()
    columns: Dims = (("n",),) if len(b) > 1 else ()
    batch = letters("b", rank - len(rows) - len(columns))
    left = (*aligned(batch, max(len(a) - 2, 0)), *rows, ("k",))
    right = (*aligned(batch, max(len(b) - 2, 0)), ("k",), *columns)
    return left, right, (*batch, *rows, *columns)


def _linear_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("weight"))[-1] + prod(out) * bool(of(args.get("bias")))


def _addmm_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("mat1"))[1] + prod(out)


def _product_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("self"))[-1]


def _addmv_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("mat"))[-1] + prod(out)


def _baddbmm_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("batch1"))[-1] + prod(out)


def copied(shapes: Sequence[Shape], found: int, width: int) -> int:
    """All that a product keeps inside: copies of operands that do not lie as it reads them, made of
    what autocast has cast."""
    return found


_MATMUL = OpFacts(op_class=OpClass.MATMUL, narrows=copied)
_PRODUCT = replace(_MATMUL, rule=_product, flops=_product_flops, products=matrix_products())
_ADDED = replace(_MATMUL, rule=_added_product, products=matrix_products(1))
FACTS = {
    **named(
        "linear",
        replace(
            _MATMUL, rule=_linear, flops=_linear_flops, products=matrix_products(transposed=True)
        ),
    ),
    **named("mm bmm matmul mv", _PRODUCT),
    **named("dot vdot", replace(_MATMUL, rule=_product, flops=_product_flops)),
    **named("addmm", replace(_ADDED, flops=_addmm_flops)),
    **named("baddbmm", replace(_ADDED, flops=_baddbmm_flops)),
    **named("addmv", replace(_ADDED, flops=_addmv_flops, products=None)),
    **named("outer", replace(_MATMUL, rule=_outer)),
    **named("addmm_", OpFacts(flops=_addmm_flops)),
    **named("baddbmm_", OpFacts(flops=_baddbmm_flops)),
}
