"""A layer of a profile, whose inside is unknown: only the batch may be split."""

from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.profiled_graph import LAYER
from meshwright.ir.graph.rules import Dims, Rule, input_shapes, make_rule, output_shapes


def _rule(op: Op, graph: Graph) -> Rule:
    """Values [b, n], weights [n] -> values [b, n]; the loss is a sum over the batch."""
    held = [graph.tensors[name].kind is Kind.PARAMETER for name in op.inputs]
    inputs = [
        _dims(f"i{i}", len(shape), batch=not state)
        for i, (shape, state) in enumerate(zip(input_shapes(op, graph), held, strict=True))
    ]
    outputs = [
        _dims(f"o{i}", len(shape), batch=True) for i, shape in enumerate(output_shapes(op, graph))
    ]
    whole = {f for dims in (*inputs, *outputs) for d in dims for f in d} - {"b"}
    return make_rule(op, graph, inputs, outputs, whole=whole, batch=["b"])


def _dims(name: str, rank: int, *, batch: bool) -> Dims:
    first = ("b",) if batch else (name,)
    return (first, (f"{name}n",))[:rank]


FACTS = {LAYER: OpFacts(rule=_rule)}
