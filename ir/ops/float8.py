"""Linear layers with products of 8-bit floats: split as others, but no summand is scaled; and what
torchao has at once while it casts."""

from dataclasses import replace
from math import prod

from meshwright.ir.graph.float8 import fits_float8
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import CallPart, OpFacts
from meshwright.ir.graph.rules import Rule
from meshwright.ir.ops.matmul import FACTS as PLAIN

_CAST = 9
"""Bytes that are there at once for each value that is cast: scaled and clamped in float32, and the
8-bit one."""


def _rule(op: Op, graph: Graph) -> Rule | None:
    plain = PLAIN["aten.linear"]
    assert plain.rule is not None
    found = plain.rule(op, graph)
    return replace(found, linear=()) if found else None


def _sizes(part: CallPart) -> tuple[int, int, int] | None:
    """Values of input, weight and result; None where the product is of values as they are."""
    rows, (n, k) = prod(part.shapes[0][:-1]), part.shapes[1]
    return (rows * k, n * k, rows * n) if fits_float8(Gemm(1, rows, n, k)) else None


def _forward_inside(op: Op, part: CallPart) -> int:
    """The input is cast, then the weight, and both are there in the product."""
    if not (sizes := _sizes(part)):
        return 0
    x, weight, result = sizes
    cast = max(_CAST * x, x + _CAST * weight) - result * part.width
    return max(cast, x + weight)


def _casts(op: Op, part: CallPart) -> int:
    """What the result's gradient is cast to by rows, and the weight, stay; then the gradient is
    cast by columns, and the input. The input's own gradient is there from the first product on,
    even if nobody wants it."""
    if not (sizes := _sizes(part)):
        return 0
    x, weight, result = sizes
    first = result + _CAST * weight
    stay = result + weight + x * part.width
    counted = x * part.width * part.wanted[0]
    return max(first, stay + max(_CAST * result, result + _CAST * x)) - counted


def _last_product(op: Op, part: CallPart) -> int:
    """All four casts are there as the weight's gradient is made, even if nobody wants that."""
    if not (sizes := _sizes(part)):
        return 0
    x, weight, result = sizes
    unwanted = x * (not part.wanted[0]) + weight * (not part.wanted[1])
    return 2 * result + weight + x + unwanted * part.width


_LINEAR = replace(
    PLAIN["aten.linear"],
    rule=_rule,
    forward_inside=_forward_inside,
    temporaries=_last_product,
    temporaries_before=_casts,
)
FACTS: dict[str, OpFacts] = {
    "meshwright.rowwise_linear": replace(_LINEAR, scaled="row"),
    "meshwright.tensorwise_linear": replace(_LINEAR, scaled="tensor"),
}
