"""Ops that cannot be recorded in a CUDA graph and replayed."""

from meshwright.ir.graph.draws import draws
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.profiled_graph import LAYER
from meshwright.ir.graph.rules import name_of
from meshwright.ir.torch_private import reads_values

_BY_PLACE = {"dropout", "dropout_", "meshwright.bias_gelu_dropout", "scaled_dot_product_attention"}
"""What draws numbers whose key the device reads (`runtime.capture.held_numbers`)."""


def forbids(op: Op, graph: Graph) -> str:
    """Returns why an op cannot be recorded; empty if it can."""
    if op.target.startswith(f"{LAYER}."):
        return "is a layer of a profile, and which operators it calls is not known"
    if draws(op) and name_of(op) not in _BY_PLACE:
        return "draws from a generator, to which the host gives a seed in each micro-batch"
    if op.target == EXPERTS_TARGET:
        return "sends tokens by counts that only a run tells"
    masked = any(graph.tensors[name].dtype == "bool" for name in op.inputs)
    if reads_values(operator(op.target), masked=masked):
        return "has results whose shape, or value, the host reads"
    return ""
