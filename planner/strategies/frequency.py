"""How often rows are looked up is a sum over the batch; gradients are divided where they are."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule, name_of


def rule(op: Op, graph: Graph) -> Rule | None:
    match name_of(op):
        case "meshwright.count_rows":
            indices = letters("i", len(input_shapes(op, graph)[0]))
            return make_rule(op, graph, [indices], [(("w",),)], whole="w")
        case "meshwright.divide_gradient":
            dims = letters("i", len(input_shapes(op, graph)[1]))
            found = (*dims, ("d",))
            return make_rule(op, graph, [found, dims, (("w",),)], [found], whole="w", linear=[{0}])
    return None
