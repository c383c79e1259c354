"""Distances of all rows of one table from all rows of another: a product of the two, as a rule."""

from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.op_facts import Args, CallPart, OpFacts, Shape, ShapeOf
from meshwright.ir.graph.rules import given

_BY_PRODUCTS = 25
"""Rows of one of the tables above which torch takes products, unless it is told (Distance.cpp)."""


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """A product and a sum for each value of each pair of rows, also where differences are taken."""
    return 2 * prod(out) * of(args.get("x1"))[-1]


def _temporaries(op: Op, part: CallPart) -> int:
    """Both gradients are made by products, as a product, what is taken of it and the difference,
    that are there until the last is made; or each by a kernel that wants its distances turned."""
    first, second = part.shapes[:2]
    distances = prod(first[:-1]) * second[-2]
    if not _by_products(op, first[-2], second[-2]):
        return 2 * distances * part.width * part.wanted[1]
    sums = prod(first[:-1]) + prod(second[:-1])
    inside = (3 * (prod(first) + prod(second)) + sums - part.wanted_values()) * part.width
    flags = distances - part.wanted_values() * part.width  # while there is no gradient yet
    return distances * part.width + max(flags, inside)


def _by_products(op: Op, first: int, second: int) -> bool:
    mode = given(op, "compute_mode")
    if given(op, "p", 2.0) != 2 or mode == 2:
        return False
    return mode == 1 or max(first, second) > _BY_PRODUCTS


FACTS = {
    "aten.cdist": OpFacts(op_class=OpClass.MATMUL, flops=_flops, temporaries=_temporaries),
}
