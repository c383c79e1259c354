"""Matrix products: split rows, columns, batches, or the contracted dim (which gives sums)."""

from collections.abc import Callable

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)


def rule(op: Op, graph: Graph) -> Rule | None:
    found = _RULES.get(name_of(op))
    return found(op, graph) if found else None


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


def _einsum(op: Op, graph: Graph) -> Rule | None:
    """Letters are factors; an ellipsis or a repeated letter in one operand is not taken apart."""
    equation = str(given(op, "equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(t)) != len(t) for t in (*terms, right)):
        return None
    inputs = [tuple((c,) for c in term) for term in terms]
    linear = [{i} for i in range(len(terms))]
    return make_rule(op, graph, inputs, [tuple((c,) for c in right)], linear=linear)


_RULES: dict[str, Callable[[Op, Graph], Rule | None]] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _added_product),
    "outer": _outer,
    "einsum": _einsum,
}
