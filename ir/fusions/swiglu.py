"""The gated product of SwiGLU: silu(gate) * up."""

from meshwright.ir.fusions.flow import Flow, Match, Miss, either_way, kernel_call
from meshwright.ir.raw import RawOp

ANCHORS = ("aten.mul.Tensor",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    for gated, up in either_way(op):
        silu = flow.maker(gated, "aten.silu.default")
        if silu is None:
            continue
        if flow.shape(up) != flow.shape(gated):
            return Miss("the other factor is broadcast")
        given = {"gate": silu.args["self"], "up": up}
        return Match((silu, op), kernel_call("swiglu", given, op, [op.outputs[0]]), op)
    return None
