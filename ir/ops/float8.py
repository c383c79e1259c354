"""Linear layers with products of 8-bit floats: split as others, but no summand is scaled."""

from dataclasses import replace

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule
from meshwright.ir.ops.matmul import FACTS as PLAIN


def _rule(op: Op, graph: Graph) -> Rule | None:
    plain = PLAIN["aten.linear"]
    assert plain.rule is not None
    found = plain.rule(op, graph)
    return replace(found, linear=()) if found else None


_LINEAR = replace(PLAIN["aten.linear"], rule=_rule)
FACTS: dict[str, OpFacts] = {
    "meshwright.rowwise_linear": replace(_LINEAR, scaled="row"),
    "meshwright.tensorwise_linear": replace(_LINEAR, scaled="tensor"),
}
