"""Losses: sums over rows are summands of the whole loss; classes may be split in cross-entropy."""

from dataclasses import replace
from itertools import zip_longest
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, CallPart, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.op_forms import own_classes
from meshwright.ir.graph.op_site import Form, OpSite
from meshwright.ir.graph.rules import (
    Rule,
    aligned,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
)
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.layout.op_messages import Inner, Operands


def _count_valid(op: Op, graph: Graph) -> Rule:
    labels = letters("t", len(input_shapes(op, graph)[0]))
    weights = [(("w",),)] * (len(op.inputs) - 1)
    return make_rule(op, graph, [labels, *weights], [()], whole="w")


def _elementwise(op: Op, graph: Graph) -> Rule:
    """Its reduction is 0 none, 1 mean, 2 sum; the mean is over the elements."""
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


def _mean_loss(site: OpSite, form: Form) -> Form:
    """Reduction 1 is the mean: the local sum over the global count."""
    if not site.sums() or site.is_whole() or form.arg("reduction") != 1:
        return form
    sides = (site.input(0).shape[::-1], site.input(1).shape[::-1])
    return replace(
        form.having(reduction=2), divisor=prod(map(max, zip_longest(*sides, fillvalue=1)))
    )


def _cross_entropy_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    return 5 * prod(of(args.get("logits")) or of(args.get("self")))


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Largest logit, sum of exponentials and own logit of each row; nothing in backward."""
    logits, placed = inputs[0], strategy.inputs[0]
    if not isinstance(placed, Shard) or placed.dim != 1:
        return ()
    row = logits.nbytes // logits.shape[1]
    single = 2 if dict(op.args).get("label_smoothing") else 1
    return (
        Inner(Primitive.ALL_REDUCE, row, single, backward=False),
        Inner(Primitive.ALL_REDUCE, 2 * row, 1, backward=False),
    )


def _divergence_inside(op: Op, part: CallPart) -> int:
    """Products with the targets' logarithms and with the input, and their difference; of targets
    that are logarithms only what their exponential is multiplied to."""
    return prod(part.shapes[0]) * part.width * (1 if given(op, "log_target") else 3)


def _divergence(op: Op, part: CallPart) -> int:
    """Torch makes both gradients, from one that is turned round or from several with flags where
    the targets are not positive; of logarithms each goes as its kernel has run."""
    whole = given(op, "reduction") != 2  # a sum's gradient is one number, seen as a table
    if given(op, "log_target"):
        return prod(part.shapes[0]) * part.width * whole
    values, flags = (4 - sum(part.wanted) + whole, 3) if part.wanted[1] else (1, 0)
    return prod(part.shapes[0]) * (values * part.width + flags)


_LOSS = OpFacts(rule=_elementwise, form=_mean_loss)
_REDUCED = replace(_LOSS, op_class=OpClass.REDUCTION)
_ROWS = OpFacts(op_class=OpClass.NORMALIZATION)
_CROSS_ENTROPY = replace(_ROWS, flops=_cross_entropy_flops, logarithms=True)
FACTS = {
    **named(
        "mse_loss l1_loss binary_cross_entropy_with_logits smooth_l1_loss binary_cross_entropy",
        _REDUCED,
    ),
    **named("huber_loss soft_margin_loss", _LOSS),
    **named("kl_div", replace(_LOSS, forward_inside=_divergence_inside, temporaries=_divergence)),
    **named("cross_entropy_loss", _CROSS_ENTROPY),
    **named("nll_loss nll_loss_nd", _ROWS),
    "meshwright.cross_entropy_sum": replace(
        _CROSS_ENTROPY,
        rule=_cross_entropy,
        form=own_classes("cross_entropy_sum"),
        messages=_messages,
    ),
    "meshwright.count_valid": OpFacts(op_class=OpClass.REDUCTION, rule=_count_valid),
}
