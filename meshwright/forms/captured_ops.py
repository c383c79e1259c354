"""Ops that cannot be recorded in a CUDA graph and replayed."""

from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.noise import is_random
from meshwright.ir.graph.operators import operator
from meshwright.ir.torch_private import reads_values


def forbids(op: Op, graph: Graph) -> str:
    """Returns why an op cannot be recorded; empty if it can."""
    if _draws(op):
        return "draws random numbers, whose key the host makes of the step's number"
    if op.target == EXPERTS_TARGET:
        return "sends tokens by counts that only a run tells"
    masked = any(graph.tensors[name].dtype == "bool" for name in op.inputs)
    if reads_values(operator(op.target), masked=masked):
        return "has results whose shape, or value, the host reads"
    return ""


def _draws(op: Op) -> bool:
    """Whether a call draws random numbers when it trains: dropout of nothing does not."""
    given = dict(op.args)
    names = ["dropout_p", "dropout", *(["p"] if "dropout" in op.target else [])]
    chances = [given[name] for name in names if name in given]
    if not chances:
        return is_random(operator(op.target))
    return any(map(bool, chances)) and given.get("train", True) is not False
