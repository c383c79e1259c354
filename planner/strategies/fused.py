"""Operators of fused kernels: what they normalise along and turn stays whole."""

from meshwright.ir.graph import Graph, Op
from meshwright.planner.inside.rules import Rule, input_shapes, letters, make_rule, name_of


def rule(op: Op, graph: Graph) -> Rule | None:
    match name_of(op):
        case "meshwright.rms_norm":
            return _norm(op, graph, sums=1)
        case "meshwright.add_rms_norm" | "meshwright.add_layer_norm":
            return _norm(op, graph, sums=2)
        case "meshwright.swiglu":
            dims = letters("d", len(input_shapes(op, graph)[0]))
            return make_rule(op, graph, [dims, dims], [dims], linear=[{1}])
        case "meshwright.bias_gelu" | "meshwright.bias_gelu_dropout":
            dims = letters("d", len(input_shapes(op, graph)[0]))
            return make_rule(op, graph, [dims, dims[-1:]], [dims])
        case "meshwright.rotary":
            return _rotary(op, graph)
        case "meshwright.cross_entropy_total":
            return _cross_entropy(op, graph)
    return None


def _norm(op: Op, graph: Graph, sums: int) -> Rule:
    """x (and residual) [..., n], gain (and bias) [n] -> the sum, the norm, statistics [...]."""
    shapes = input_shapes(op, graph)
    dims = (*letters("d", len(shapes[0]) - 1), ("n",))
    inputs = [dims] * sums + [(("n",),)] * (len(shapes) - sums)
    statistics = [dims[:-1]] * (len(op.outputs) - sums)
    return make_rule(op, graph, inputs, [dims] * sums + statistics, whole="n")


def _rotary(op: Op, graph: Graph) -> Rule:
    """x[b, h, t, e] and angles [b or 1, t, e], whose gradients nobody wants."""
    x = (("b",), ("h",), ("t",), ("e",))
    angles = (("b",), ("t",), ("e",))
    return make_rule(op, graph, [x, angles, angles], [x], whole="e", linear=[{0}])


def _cross_entropy(op: Op, graph: Graph) -> Rule:
    """logits[t, v] and labels[t] -> the sum, and per token what its backward needs, exchanged by
    ranks that split classes."""
    rows = (("t",),)
    inputs, outputs = [(*rows, ("v",)), rows], [(), rows, rows]
    return make_rule(op, graph, inputs, outputs, joined="v", plain="v")
