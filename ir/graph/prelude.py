"""What a step does before its blocks: ops that depend on no parameter, laid out as one."""

from meshwright.ir.graph.graph import Block, Graph, Kind

PRELUDE = "(prelude)"
"""Its name and its pattern among those of blocks."""


def prelude_block(graph: Graph) -> Block:
    """The prelude as if it were a block."""
    ops = graph.prelude_ops
    made = {out for op in ops for out in op.outputs if out}
    read = {name for op in ops for name in op.inputs}
    later = {name for op in graph.ops[graph.prelude :] for name in op.inputs}
    return Block(
        name=PRELUDE,
        pattern=PRELUDE,
        signature=PRELUDE,
        start=0,
        stop=graph.prelude,
        inputs=tuple(name for name in graph.inputs if name in read),
        outputs=tuple(out for op in ops for out in op.outputs if out in made & later),
        params=tuple(n for n in sorted(read - made) if graph.tensors[n].kind is not Kind.INPUT),
    )
