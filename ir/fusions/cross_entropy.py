"""Summed cross-entropy that keeps neither probabilities nor a wider copy of the logits."""

from meshwright.ir.fusions.flow import Flow, Match, Miss, kernel_call
from meshwright.ir.graph import Arg, Ref
from meshwright.ir.raw import RawOp, make_op

ANCHORS = ("meshwright.cross_entropy_sum.default",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    logits = op.args["logits"]
    if op.args["weight"] is not None or op.args["label_smoothing"]:
        return Miss("it weighs classes or smooths labels")
    if len(flow.shape(logits)) != 2:
        return Miss("its logits are not [tokens, classes]")
    read, replaced, before = _unwidened(flow, logits)
    given: dict[str, Arg] = {
        "logits": read, "target": op.args["target"], "ignore_index": op.args["ignore_index"],
    }  # fmt: skip
    fused = kernel_call("cross_entropy_total", given, op, [op.outputs[0], "", ""])
    return Match((*replaced, op), fused, op, before)


def _unwidened(flow: Flow, logits: Arg) -> tuple[Arg, tuple[RawOp, ...], tuple[RawOp, ...]]:
    """The logits before they were cast up for the loss, what did that, and what is called instead:
    the kernel sums in float32 whatever it reads."""
    view = flow.maker(logits, "aten.view.default", "aten.reshape.default")
    inner, casts = flow.uncast(view.args["self"] if view else logits)
    if not casts or not isinstance(inner, Ref) or not flow.is_widened(casts):
        return logits, (), ()
    if view is None:
        return inner, casts, ()
    again = flow.with_example(make_op(view.target, {**view.args, "self": inner}, view, [""]))
    return Ref(again.outputs[0]), (*casts, view), (again,)
