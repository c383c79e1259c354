"""Which parameters hold experts, one after the other along their first dim."""

from meshwright.costmodel.ops.op_classes import is_view
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph, Kind


def expert_weights(graph: Graph) -> dict[str, int]:
    """Names of what an op of experts reads, or what that is a view of, with how many experts it
    holds. Views are followed, as stacks of matrices one under the other are views of parameters."""
    found: dict[str, int] = {}
    if EXPERTS_TARGET not in graph.targets:
        return found
    for op in reversed(graph.ops):
        if op.target == EXPERTS_TARGET:
            count = graph.tensors[op.inputs[3]].shape[0]
            found |= dict.fromkeys(op.inputs, count)
        elif is_view(op.target) and op.outputs[0] in found:
            found[op.inputs[0]] = found[op.outputs[0]]
    kinds = {name: graph.tensors[name].kind for name in found}
    return {name: count for name, count in found.items() if kinds[name] is Kind.PARAMETER}
