"""How often rows are looked up is a sum over the batch; gradients are divided where they are."""

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule


def _count_rows(op: Op, graph: Graph) -> Rule:
    indices = letters("i", len(input_shapes(op, graph)[0]))
    return make_rule(op, graph, [indices], [(("w",),)], whole="w")


def _divide_gradient(op: Op, graph: Graph) -> Rule:
    dims = letters("i", len(input_shapes(op, graph)[1]))
    found = (*dims, ("d",))
    return make_rule(op, graph, [found, dims, (("w",),)], [found], whole="w", linear=[{0}])


FACTS = {
    "meshwright.count_rows": OpFacts(op_class=OpClass.REDUCTION, rule=_count_rows),
    "meshwright.divide_gradient": OpFacts(op_class=OpClass.COPY, rule=_divide_gradient),
}
