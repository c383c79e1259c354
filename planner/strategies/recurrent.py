"""Recurrent layers, whole as one op: only the batch may be split."""

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
    slots,
)


def rule(op: Op, graph: Graph) -> Rule | None:
    """x[t, b, i] (or [b, t, i]), states[layers, b, h], weights -> out as x, states."""
    if name_of(op) not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or not op.target.endswith(
        ".input"
    ):
        return None
    shapes = input_shapes(op, graph)
    if len(shapes[0]) != 3:
        return None
    states, weights = slots(op, "hx"), slots(op, "params")
    at = 0 if given(op, "batch_first") else 1
    inputs: list[Dims] = []
    for i, shape in enumerate(shapes):
        own = letters(f"i{i}_", len(shape))
        place = at if i == 0 else 1
        inputs.append(own if i in weights else _with_batch(own, place))
        assert i == 0 or i in states or i in weights
    outs = [
        _with_batch(letters(f"o{k}_", len(shape)), 1 if k else at)
        for k, shape in enumerate(output_shapes(op, graph))
    ]
    whole = {f for dims in (*inputs, *outs) for d in dims for f in d} - {"b"}
    return make_rule(op, graph, inputs, outs, whole=whole)


def _with_batch(dims: Dims, at: int) -> Dims:
    return (*dims[:at], ("b",), *dims[at + 1 :])
