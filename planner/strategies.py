"""How ops may be split: as the facts of their family say (`ir.ops`).

The rule of an op of which no file has one is found by trying it (`planner.discovery`); if nothing
is found, it is computed whole.
"""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.rules import Rule
from meshwright.ir.ops import facts
from meshwright.ir.torch_private import makes_view
from meshwright.ir.trace.changing import written
from meshwright.planner.discovery.rule import discovered


def find_rule(op: Op, graph: Graph) -> Rule | None:
    """The rule that the op's family has for it, else what trying it finds."""
    return None if writes_state(op, graph) else known_rule(op, graph) or discovered(op, graph)


def writes_state(op: Op, graph: Graph) -> bool:
    """Whether the op changes a buffer in place, or takes a view through which another op does.

    Ranks hold buffers whole, and what is written to a part that was cut off would be lost.
    """
    if written(op):
        return True
    return _is_view(op) and any(
        _passes(user, out) and writes_state(user, graph)
        for out in op.outputs
        for user in graph.users.get(out, ())
    )


def _passes(op: Op, name: str) -> bool:
    """Whether it is what the op writes, or a view of."""
    return name in (written(op) or op.inputs[:1])


def _is_view(op: Op) -> bool:
    return op.target.startswith("aten.") and makes_view(operator(op.target))


def known_rule(op: Op, graph: Graph) -> Rule | None:
    """The rule that the op's family has for it."""
    rule = facts(op.target).rule
    return rule(op, graph) if rule else None


def found_by_trying(graph: Graph) -> tuple[str, ...]:
    """Operators of the graph of which no family has a rule and that may be split all the same."""
    ops = (op for block in graph.distinct_blocks() for op in graph.block_ops(block))
    unknown = [op for op in (*graph.prelude_ops, *ops) if known_rule(op, graph) is None]
    return tuple(sorted({op.target for op in unknown if discovered(op, graph) is not None}))
