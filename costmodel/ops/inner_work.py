"""What an op does in many small kernels, one after the other."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import InnerPass
from meshwright.ir.ops import facts


def inner_work(op: Op, graph: Graph, share: float) -> tuple[InnerPass, ...]:
    """Count what a forward does on a share of its values, and what its gradients take beside that;
    () of an op that is one kernel."""
    count = facts(op.target).one_by_one
    return tuple(each.on_part(share) for each in count(op, graph)) if count else ()
