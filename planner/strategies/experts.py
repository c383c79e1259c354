"""A whole mixture of expert MLPs as one op: split tokens, experts, the inner dim of each, or tokens
and experts together, so that tokens travel."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import Rule, input_shapes, make_rule, name_of


def rule(op: Op, graph: Graph) -> Rule | None:
    """hidden[t, h] index[t, k] weights[t, k] gate_up[e, 2 i, h] down[e, h, i] -> [t, h]."""
    if name_of(op) != "meshwright.experts":
        return None
    _, index, _, gate_up, down = input_shapes(op, graph)[:5]
    inner = down[2]
    sizes = {"two": gate_up[1] // inner, "i": inner}
    gates = ("two",) * (sizes["two"] > 1) + ("i",)
    inputs = [
        (("t",), ("h",)),
        (("t",), ("k",)),
        (("t",), ("k",)),
        (("e",), gates, ("h",)),
        (("e",), ("h",), ("i",)),
    ]
    whole = {"two", "h", "k"}
    return make_rule(
        op, graph, inputs, [(("t",), ("h",))], sizes=sizes, whole=whole, plain="e",
        together={"route": ("t", "e")}, loose="t",
    ) if len(index) == 2 else None  # fmt: skip
