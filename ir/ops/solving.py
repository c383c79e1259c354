"""Triangular systems: split the batch or the columns; no rank has a part of a triangle."""

from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, CallPart, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.rules import (
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
)


def _rule(op: Op, graph: Graph) -> Rule:
    """a[..., n, n] and b[..., n, k] give x[..., n, k], or b and x are [..., k, n]."""
    a, b = input_shapes(op, graph)
    batch = letters("b", len(output_shapes(op, graph)[0]) - 2)
    columns = (("n",), ("k",)) if given(op, "left", True) else (("k",), ("n",))
    inputs = [
        (*aligned(batch, len(a) - 2), ("n",), ("m",)),
        (*aligned(batch, len(b) - 2), *columns),
    ]
    made = [(*batch, *columns)]
    return make_rule(op, graph, inputs, made, whole=("n", "m"), linear=[{1}])


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """A product and a sum for each half of a triangle: n for each value."""
    return prod(out) * of(args.get("self"))[-1]


def _temporaries(op: Op, part: CallPart) -> int:
    """A triangle's gradient is a product, of which torch takes the negative, then one half."""
    return prod(part.shapes[0]) * part.width * part.wanted[0]


FACTS = named(
    "linalg_solve_triangular",
    OpFacts(op_class=OpClass.MATMUL, rule=_rule, flops=_flops, temporaries=_temporaries),
)
