"""Whether a block may run on some samples of a micro-batch at a time."""

from meshwright.ir.graph.bags import looks_up_given
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.ops import facts
from meshwright.ir.trace.changing import written


def has_apart(graph: Graph, block: Block) -> bool:
    """Tells whether all ops of a block see each sample by itself, change nothing that they read
    and draw nothing, and read no bags, which only a batch is cut into."""
    return not any(
        facts(op.target).mixes_samples or written(op) or looks_up_given(op, graph)
        for op in graph.block_ops(block)
    )
