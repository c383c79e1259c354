"""What an op does in many small kernels, one after the other."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.ops import facts


def inner_work(op: Op, graph: Graph) -> tuple[int, int]:
    """Count the kernels of a forward, and the bytes that they read and write, of whole operands;
    (0, 0) of an op that is one kernel."""
    count = facts(op.target).one_by_one
    return count(op, graph) if count else (0, 0)
