"""Random ops: noise is drawn sample by sample, so it may be split anywhere; what cannot be computed
from noise runs sample by sample, and only samples are split."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)

EACH = frozenset("poisson binomial _standard_gamma multinomial _sample_dirichlet".split())
"""Run sample by sample: dim 0 of all they read and make."""


def rule(op: Op, graph: Graph) -> Rule | None:
    name = name_of(op)
    if name == "meshwright.noise_of":
        return make_rule(op, graph, [], [letters("d", len(output_shapes(op, graph)[0]))])
    if name == "meshwright.noise":
        return _like(op, graph)
    if name in ("meshwright.drop", "meshwright.random_slope"):
        dims = letters("d", len(output_shapes(op, graph)[0]))
        return make_rule(op, graph, [dims, dims], [dims])
    return _each(op, graph) if name in EACH else None


def _like(op: Op, graph: Graph) -> Rule:
    """Only the shape of the input counts; behind its first `dims` the noise has dims of size 1."""
    dims = letters("d", len(input_shapes(op, graph)[0]))
    count = int(str(given(op, "dims")))
    unread = [d[0] for d in dims[count:]]
    out: Dims = (*dims[:count], *(() for _ in dims[count:]))
    return make_rule(op, graph, [dims], [out], joined=unread)


def _each(op: Op, graph: Graph) -> Rule | None:
    shapes = (*input_shapes(op, graph), *output_shapes(op, graph))
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        return None
    dims: list[Dims] = [
        (("b",), *letters(f"w{i}_", len(shape) - 1)) for i, shape in enumerate(shapes)
    ]
    if name_of(op) == "multinomial" and len(shapes[0]) == 1:
        return None
    whole = {f for each in dims for d in each[1:] for f in d}
    count = len(op.inputs)
    return make_rule(op, graph, dims[:count], dims[count:], whole=whole, batch="b", plain="b")
