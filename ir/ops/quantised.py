"""Products with quantised weights: split rows of the weight, or whole blocks of what is summed
over, which gives sums; a block is never cut."""

from collections.abc import Sequence
from math import gcd, prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf
from meshwright.ir.graph.quantised import PIECE
from meshwright.ir.graph.rules import Dims, Rule, input_shapes, letters, make_rule

_UNPACKING = 3
"""Operations for each value of the weight: its half of a byte, its zero point, its scale."""


def _rule(op: Op, graph: Graph) -> Rule:
    """x[..., g, k] codes[o, g, bytes] scale[o, g] (zero[o, g]) -> [..., o]."""
    x, *others = input_shapes(op, graph)
    rows = letters("m", len(x) - 2)
    weight: Dims = (("o",), ("g",))
    inputs: list[Dims] = [(*rows, ("g",), ("k",)), (*weight, ("b",))]
    inputs += [weight for _ in others[1:]]
    return make_rule(op, graph, inputs, [(*rows, ("o",))], whole="kb", linear=[{0}])


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    groups, block = of(args.get("x"))[-2:]
    rows = of(args.get("codes"))[0]
    return (2 * prod(out) + _UNPACKING * rows) * groups * block


def _products(shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    x, codes = shapes[:2]
    inner, rows = x[-2] * x[-1], codes[0]
    return (Gemm(1, prod(x[:-2]), rows, inner, gcd(rows, inner)),) if inner * rows else ()


def _inside(shapes: Sequence[Shape]) -> tuple[int, int]:
    """Values of the weight that are made wide, and how many of them are there at once."""
    x, codes = shapes[:2]
    width = x[-2] * x[-1]
    rows = min(codes[0], max(1, PIECE // max(1, width)))
    return codes[0] * width, rows * width


FACTS = {
    "meshwright.quantised_linear": OpFacts(
        op_class=OpClass.MATMUL,
        rule=_rule,
        flops=_flops,
        products=_products,
        inside=_inside,
    )
}
