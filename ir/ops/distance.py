"""Distances of all rows of one table from all rows of another: what their backward makes inside."""

from collections.abc import Sequence
from math import prod

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.op_facts import OpFacts, Shape
from meshwright.ir.graph.rules import given

_BY_PRODUCTS = 25
"""Rows of one of the tables above which torch takes products, unless it is told (Distance.cpp)."""


def _temporaries(op: Op, shapes: Sequence[Shape], wanted: Sequence[bool], width: int) -> int:
    """Both gradients are made by products, as a product, what is taken of it and the difference,
    that are there until the last is made; or each by a kernel that wants its distances turned."""
    first, second = shapes[:2]
    distances = prod(first[:-1]) * second[-2]
    if not _by_products(op, first[-2], second[-2]):
        return 2 * distances * width * wanted[1]
    sums = prod(first[:-1]) + prod(second[:-1])
    rows = prod(first) + prod(second)
    made = sum(prod(s) for s, has in zip((first, second), wanted, strict=True) if has)
    ratios = distances * width
    return ratios + max(distances - made * width, (3 * rows + sums - made) * width)


def _by_products(op: Op, first: int, second: int) -> bool:
    mode = given(op, "compute_mode")
    if given(op, "p", 2.0) != 2 or mode == 2:
        return False
    return mode == 1 or max(first, second) > _BY_PRODUCTS


FACTS = {"aten.cdist": OpFacts(temporaries=_temporaries)}
