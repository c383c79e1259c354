"""Values made from nothing: constant ones may be made in parts, counting ones only whole."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)

CONSTANT = frozenset(["full", "zeros", "ones", "empty"])
NEW = frozenset(["new_full", "new_zeros", "new_ones", "new_empty"])
COUNTING = frozenset("arange linspace eye scalar_tensor tril_indices triu_indices randperm".split())


def rule(op: Op, graph: Graph) -> Rule | None:
    name = name_of(op)
    if name not in CONSTANT | NEW | COUNTING:
        return None
    out = letters("d", len(output_shapes(op, graph)[0]))
    if name in NEW:
        return _like(op, graph, out)
    whole = {f for d in out for f in d} if name in COUNTING else set()
    return make_rule(op, graph, [], [out], whole=whole) if not op.inputs else None


def _like(op: Op, graph: Graph, out: Dims) -> Rule:
    """Only the dtype of the input counts, so any placement of it will do: equal dims are linked."""
    shape, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    linked = [i < len(target) and n == target[i] for i, n in enumerate(shape)]
    inside = tuple(out[i] if same else (f"x{i}",) for i, same in enumerate(linked))
    unread = [d[0] for d, same in zip(inside, linked, strict=True) if not same]
    return make_rule(op, graph, [inside], [out], joined=unread)
