"""Recurrent layers, whole as one op: only the batch may be split."""

from dataclasses import replace
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
    slots,
)
from meshwright.ir.ops.noise import seeded


def _rule(op: Op, graph: Graph) -> Rule | None:
    """x[t, b, i] (or [b, t, i]), states[layers, b, h], weights -> out as x, states."""
    shapes = input_shapes(op, graph)
    if not op.target.endswith(".input") or len(shapes[0]) != 3:
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


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Each weight matrix once per token (tokens: the first two dims of the input)."""
    params = args.get("params")
    assert isinstance(params, tuple)
    weights = (of(p) for p in params)
    return 2 * prod(of(args.get("input"))[:2]) * sum(prod(w) for w in weights if len(w) == 2)


_CELL = OpFacts(op_class=OpClass.RECURRENT)
_LAYER = replace(_CELL, rule=_rule, form=seeded)
FACTS = {
    **named("lstm gru", replace(_LAYER, flops=_flops)),
    **named("rnn_tanh rnn_relu", _LAYER),
    **named("lstm_cell gru_cell", _CELL),
}
