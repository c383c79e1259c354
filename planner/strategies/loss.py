"""Losses: sums over rows are summands of the whole loss; classes may be split in cross-entropy."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)

ELEMENTWISE = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
    "binary_cross_entropy_with_logits kl_div".split()
)
"""Their reduction argument is 0 none, 1 mean, 2 sum; the mean is over the elements."""


def rule(op: Op, graph: Graph) -> Rule | None:
    name = name_of(op)
    if name in ELEMENTWISE:
        return _elementwise(op, graph)
    if name == "meshwright.cross_entropy_sum":
        return _cross_entropy(op, graph)
    if name == "meshwright.count_valid":
        labels = letters("t", len(input_shapes(op, graph)[0]))
        weights = [(("w",),)] * (len(op.inputs) - 1)
        return make_rule(op, graph, [labels, *weights], [()], whole="w")
    return None


def _elementwise(op: Op, graph: Graph) -> Rule:
    shapes = input_shapes(op, graph)
    rank = max(map(len, shapes))
    dims = letters("d", rank)
    inputs = [aligned(dims, len(shape)) for shape in shapes]
    out = dims if output_shapes(op, graph)[0] or not rank else ()
    return make_rule(op, graph, inputs, [out if given(op, "reduction") == 0 else ()])


def _cross_entropy(op: Op, graph: Graph) -> Rule:
    """logits[t, v, ...] labels[t, ...] (weight[v]) -> the sum. Split classes need the label's owner
    only; with dims behind the classes they stay whole."""
    rank = len(input_shapes(op, graph)[0])
    samples = letters("t", min(rank - 1, 1))
    behind = letters("x", rank - 2)
    inputs = [(*samples, ("v",), *behind), (*samples, *behind), (("w",),)][: len(op.inputs)]
    if rank == 2:
        return make_rule(op, graph, inputs, [()], whole="w", joined="v", plain="v")
    return make_rule(op, graph, inputs, [()], whole="wv")
