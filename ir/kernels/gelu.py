"""GELU by tanh as GPT-2 writes it out, by torch's own kernel for it."""

from math import isclose, pi, sqrt

import torch

from meshwright.ir.graph.graph import Arg
from meshwright.ir.trace.flat_trace import RawOp, make_op
from meshwright.ir.trace.flow import Flow, Match, Miss, either_way

ANCHORS = ("aten.mul.Tensor",)


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    if (found := tanh_gelu(flow, op)) is None:
        return None
    target = torch.ops.aten.gelu.default
    fused = make_op(target, {"self": found[0], "approximate": "tanh"}, op, op.outputs)
    return Match(found[1], fused, op)


def tanh_gelu(flow: Flow, op: RawOp) -> tuple[Arg, tuple[RawOp, ...]] | None:
    """x and the calls of 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), the half first."""
    if op.name != "aten.mul.Tensor":
        return None
    for half, share in either_way(op):
        halved, one = flow.maker(half, "aten.mul.Tensor"), flow.maker(share, "aten.add.Tensor")
        tanh = flow.maker(one.args["self"], "aten.tanh.default") if one else None
        if not (halved and one and tanh) or one.args["other"] != 1 or halved.args["other"] != 0.5:
            continue
        x, inner = halved.args["self"], _inner(flow, tanh.args["self"])
        if inner is None or inner[0] != x:
            continue
        return x, (halved, *inner[1], tanh, one, op)
    return None


def _inner(flow: Flow, value: Arg) -> tuple[Arg, tuple[RawOp, ...]] | None:
    """x and the calls of sqrt(2 / pi) (x + 0.044715 x^3)."""
    scaled = flow.maker(value, "aten.mul.Tensor")
    added = flow.maker(scaled.args["self"], "aten.add.Tensor") if scaled else None
    part = flow.maker(added.args["other"], "aten.mul.Tensor") if added else None
    cube = flow.maker(part.args["self"], "aten.pow.Tensor_Scalar") if part else None
    if not (scaled and added and part and cube):
        return None
    numbers = (
        _is(scaled.args["other"], sqrt(2 / pi)) and _is(part.args["other"], 0.044715)
        and cube.args["exponent"] == 3 and added.args["self"] == cube.args["self"]
    )  # fmt: skip
    return (added.args["self"], (cube, part, added, scaled)) if numbers else None


def _is(value: Arg, number: float) -> bool:
    return isinstance(value, float) and isclose(value, number, rel_tol=1e-9)
