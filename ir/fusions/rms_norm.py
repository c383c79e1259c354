"""RMSNorm written out, with the residual sum before it where there is one."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.ir.fusions.flow import Flow, Match, Miss, either_way, kernel_call, residual_sum
from meshwright.ir.graph import Arg, Ref
from meshwright.ir.raw import RawOp

ANCHORS = ("aten.mul.Tensor", "aten.rms_norm.default")


@dataclass(frozen=True, slots=True)
class _Norm:
    """gain * x / sqrt(mean(x^2) + eps)."""

    x: Arg
    gain: Arg
    eps: float
    ops: tuple[RawOp, ...]


def find(flow: Flow, op: RawOp) -> Match | Miss | None:
    norm = _whole(flow, op) if op.name == "aten.rms_norm.default" else _written_out(flow, op)
    if norm is None:
        return None
    given: dict[str, Arg] = {"gain": norm.gain, "eps": norm.eps}
    add = residual_sum(flow, norm.x, op)
    if add is None:
        fused = kernel_call("rms_norm", {"x": norm.x, **given}, op, [op.outputs[0], ""])
        # After what it reads: a cast of x may come long before.
        return Match(norm.ops, fused, op)
    given |= {"x": add.args["self"], "residual": add.args["other"]}
    fused = kernel_call("add_rms_norm", given, op, [add.outputs[0], op.outputs[0], ""])
    return Match((add, *norm.ops), fused, _first_free(flow, add, norm))


def _first_free(flow: Flow, add: RawOp, norm: _Norm) -> RawOp:
    """The sum's place, unless the gain is only made later."""
    made = isinstance(norm.gain, Ref) and norm.gain.name in flow.makers
    return norm.ops[-1] if made else add


def _whole(flow: Flow, op: RawOp) -> _Norm | None:
    x, gain, eps = op.args["input"], op.args["weight"], op.args["eps"]
    shape = flow.shape(x)
    if gain is None or op.args["normalized_shape"] != shape[-1:] or not isinstance(eps, float):
        return None
    return _Norm(x, gain, eps, (op,))


def _written_out(flow: Flow, op: RawOp) -> _Norm | None:
    for gain, normed in either_way(op):
        width = flow.shape(normed)[-1:]
        if not isinstance(gain, Ref) or flow.shape(gain) != width or not width:
            continue
        inner, casts = flow.uncast(normed)
        if found := _scaled(flow, inner):
            x, eps, ops = found
            return _Norm(x, gain, eps, (*ops, *casts, op))
    return None


def _scaled(flow: Flow, value: Arg) -> tuple[Arg, float, tuple[RawOp, ...]] | None:
    """x, eps and the calls of x * rsqrt(mean(x^2) + eps)."""
    product = flow.maker(value, "aten.mul.Tensor")
    for x, inverse in either_way(product) if product else ():
        chain = _inverse(flow, inverse)
        if chain is None or product is None:
            continue
        squared, eps, ops = chain
        plain, casts = flow.uncast(x)
        other, more = flow.uncast(squared)
        if plain == other:
            return plain, eps, tuple(_unique((*casts, *more, *ops, product)))
    return None


def _unique(ops: tuple[RawOp, ...]) -> Iterator[RawOp]:
    seen: set[int] = set()
    for op in ops:
        if id(op) not in seen:
            seen.add(id(op))
            yield op


def _inverse(flow: Flow, value: Arg) -> tuple[Arg, float, tuple[RawOp, ...]] | None:
    """What is squared, eps and the calls of rsqrt(mean(x^2) + eps)."""
    root = flow.maker(value, "aten.rsqrt.default")
    added = flow.maker(root.args["self"], "aten.add.Tensor") if root else None
    mean = flow.maker(added.args["self"], "aten.mean.dim") if added else None
    square = flow.maker(mean.args["self"], "aten.pow.Tensor_Scalar") if mean else None
    if not (root and added and mean and square):
        return None
    eps, rank = added.args["other"], len(flow.shape(square.args["self"]))
    along = mean.args["dim"] in ((-1,), (rank - 1,)) and mean.args["keepdim"]
    if not along or square.args["exponent"] != 2 or not isinstance(eps, float):
        return None
    return square.args["self"], eps, (square, mean, added, root)
