"""Values made from nothing: constant ones may be made in parts, counting ones only whole."""

from dataclasses import replace

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import NO_FLOPS, OpFacts, named
from meshwright.ir.graph.op_forms import with_size
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule, output_shapes
from meshwright.ir.ops.noise import seeded


def _constant(op: Op, graph: Graph) -> Rule | None:
    out = letters("d", len(output_shapes(op, graph)[0]))
    return None if op.inputs else make_rule(op, graph, [], [out])


def _counting(op: Op, graph: Graph) -> Rule | None:
    out = letters("d", len(output_shapes(op, graph)[0]))
    whole = {f for d in out for f in d}
    return None if op.inputs else make_rule(op, graph, [], [out], whole=whole)


def _like(op: Op, graph: Graph) -> Rule:
    """Only the dtype of the input counts, so any placement of it will do: equal dims are linked."""
    shape, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    out = letters("d", len(target))
    linked = [i < len(target) and n == target[i] for i, n in enumerate(shape)]
    inside = tuple(out[i] if same else (f"x{i}",) for i, same in enumerate(linked))
    unread = [d[0] for d, same in zip(inside, linked, strict=True) if not same]
    return make_rule(op, graph, [inside], [out], joined=unread)


_MADE = OpFacts(rule=_constant, flops=NO_FLOPS, form=with_size("size"))
_NEW = replace(_MADE, rule=_like)
_COUNTING = OpFacts(rule=_counting)
FACTS = {
    **named("full zeros ones empty", _MADE),
    **named("new_full new_zeros new_ones", _NEW),
    **named("new_empty", replace(_NEW, flops=None)),
    **named("arange", replace(_COUNTING, flops=NO_FLOPS)),
    **named("linspace eye scalar_tensor tril_indices triu_indices", _COUNTING),
    **named("randperm", replace(_COUNTING, form=seeded)),
}
