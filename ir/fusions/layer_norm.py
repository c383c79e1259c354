"""LayerNorm of a residual sum, in one pass with the sum. Alone, torch's own is one already."""

from meshwright.ir.fusions.flow import Flow, Match, Miss, kernel_call, residual_sum
from meshwright.ir.raw import RawOp

ANCHORS = ("aten.layer_norm.default",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    x, gain, bias, eps = (op.args[key] for key in ("input", "weight", "bias", "eps"))
    add = residual_sum(flow, x, op)
    if add is None:
        return None
    if gain is None or bias is None:
        return Miss("it has no gain or no bias")
    if op.args["normalized_shape"] != flow.shape(x)[-1:]:
        return Miss("it normalises several dims")
    terms = {"x": add.args["self"], "residual": add.args["other"]}
    given = {**terms, "gain": gain, "bias": bias, "eps": eps}
    outputs = [add.outputs[0], op.outputs[0], "", ""]
    return Match((add, op), kernel_call("add_layer_norm", given, op, outputs), add)
