"""RMSNorm, alone or of a sum: a residual is added, the sum kept and normalised, in one pass."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.op_facts import OpFacts, per_element
from meshwright.ir.graph.rules import along_last
from meshwright.ir.launch import Build, block, held_dtype, jit, programs, tl, warps, way, wide
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import (
    Flow,
    Match,
    Miss,
    either_way,
    first_free,
    kernel_call,
    residual_sum,
)


def reference(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The norm of x times the gain; x is [..., width], the gain [width]."""
    return _scaled(x, gain, eps)[0]


def _scaled(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm times the gain, and 1 / the root mean square."""
    held = x.to(held_dtype(x.dtype))
    inverse = torch.rsqrt(held.square().mean(-1, keepdim=True) + eps)
    return (held * inverse * gain).to(_sum_dtype(x, gain)), inverse.squeeze(-1)


def _sum_dtype(x: Tensor, other: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, other.dtype)


def added_reference(x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual, and its norm."""
    total = x + residual
    return total, reference(total, gain, eps)


@jit
def forward_kernel(
    x, residual, gain, total, out, inverse,
    width, eps, BLOCK: tl.constexpr, WIDE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = row * width + at
    held = tl.load(x + here, inside, 0.0).to(WIDE)
    if ADDED:
        held += tl.load(residual + here, inside, 0.0).to(WIDE)
        rounded = held.to(total.dtype.element_ty)
        tl.store(total + here, rounded, inside)
        held = rounded.to(WIDE)
    scale = 1.0 / tl.sqrt(tl.sum(held * held, 0) / width + eps)
    tl.store(inverse + row, scale)
    strength = tl.load(gain + at, inside, 0.0).to(WIDE)
    tl.store(out + here, (held * scale * strength).to(out.dtype.element_ty), inside)


@jit
def backward_kernel(
    grad_out, grad_total, total, gain, inverse,
    grad_x, grad_gain, rows, width, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Each program sums the gain's gradient over its rows; the caller sums over programs."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    strength = tl.load(gain + at, inside, 0.0).to(WIDE)
    summed = tl.zeros([BLOCK], dtype=WIDE)
    for row in range(first, rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * width + at
        scale = tl.load(inverse + row)
        normed = tl.load(total + here, inside, 0.0).to(WIDE) * scale
        grad = tl.load(grad_out + here, inside, 0.0).to(WIDE)
        summed += grad * normed
        scaled = grad * strength
        along = tl.sum(scaled * normed, 0) / width
        back = scale * (scaled - normed * along)
        if ADDED:
            back += tl.load(grad_total + here, inside, 0.0).to(WIDE)
        tl.store(grad_x + here, back.to(grad_x.dtype.element_ty), inside)
    tl.store(grad_gain + tl.cast(first, tl.int64) * width + at, summed, inside)


def _forward(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, or x itself; its norm; 1 / its root mean square."""
    x, width = x.contiguous(), x.shape[-1]
    other = x if residual is None else residual.contiguous()
    if way("rms_norm", x, width) == "torch":
        total = x if residual is None else x + other
        return total, *_scaled(total, gain, eps)
    total = x if residual is None else torch.empty_like(x, dtype=_sum_dtype(x, residual))
    out = torch.empty_like(x, dtype=_sum_dtype(total, gain))
    inverse = x.new_empty(x.shape[:-1], dtype=held_dtype(total.dtype))
    forward_kernel[(x.numel() // width,)](
        x, other, gain, total, out, inverse, width, eps, BLOCK=block(width),
        WIDE=wide(total.dtype), ADDED=residual is not None, num_warps=warps(width),
    )  # fmt: skip
    return total, out, inverse


@custom_op("meshwright::rms_norm", mutates_args=())
def rms_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Its norm times the gain, and 1 / its root mean square for the backward."""
    return _forward(x, None, gain, eps)[1:]


@custom_op("meshwright::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, its norm times the gain, 1 / its root mean square for the backward)."""
    return _forward(x, residual, gain, eps)


@rms_norm.register_fake
def _shapes(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape, dtype=_sum_dtype(x, gain))
    return out, x.new_empty(x.shape[:-1], dtype=held_dtype(x.dtype))


@add_rms_norm.register_fake
def _added_shapes(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(x.shape, dtype=_sum_dtype(x, residual))
    return total, *_shapes(total, gain, eps)


@custom_op("meshwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad_total: Tensor | None, grad_out: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of what was normalised, the sum's own included, and of the gain."""
    width = total.shape[-1]
    rows = total.numel() // width if width else 0
    if way("rms_norm", total, width) == "torch":
        return _backward_reference(grad_total, grad_out, total, gain, inverse)
    total, grad_out = total.contiguous(), grad_out.contiguous()
    passed = grad_out if grad_total is None else grad_total.contiguous()
    grad_x = torch.empty_like(total)
    count = programs(total, rows, width)
    partial = inverse.new_empty(count, width)
    backward_kernel[(count,)](
        grad_out, passed, total, gain, inverse, grad_x, partial, rows, width, BLOCK=block(width),
        WIDE=wide(total.dtype), ADDED=grad_total is not None, num_warps=warps(width),
    )  # fmt: skip
    return grad_x, partial.sum(0).to(gain.dtype)


def _backward_reference(
    grad_total: Tensor | None, grad_out: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    scale = inverse.unsqueeze(-1)
    normed, grad = total.to(scale.dtype) * scale, grad_out.to(scale.dtype)
    scaled = grad * gain
    back = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_total is not None:
        back = back + grad_total
    over = tuple(range(total.ndim - 1))
    return back.to(total.dtype), (grad * normed).sum(over).to(gain.dtype)


@rms_norm_backward.register_fake
def _backward_shapes(
    grad_total: Tensor | None, grad_out: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), torch.empty_like(gain)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_out, _):
    return *rms_norm_backward(None, grad_out, *ctx.saved_tensors), None


def _save_added(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate_added(ctx, grad_total, grad_out, _):
    if grad_out is None:  # nobody reads the norm
        return grad_total, grad_total, None, None
    back, to_gain = rms_norm_backward(grad_total, grad_out, *ctx.saved_tensors)
    return back, back, to_gain, None


rms_norm.register_autograd(_differentiate, setup_context=_save)
add_rms_norm.register_autograd(_differentiate_added, setup_context=_save_added)


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
    return Match((add, *norm.ops), fused, first_free(flow, add, norm.ops[-1], norm.gain))


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
        if found := _times_inverse(flow, inner):
            x, eps, ops = found
            return _Norm(x, gain, eps, (*ops, *casts, op))
    return None


def _times_inverse(flow: Flow, value: Arg) -> tuple[Arg, float, tuple[RawOp, ...]] | None:
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


OPERATORS = {"rms_norm": (rms_norm, reference), "add_rms_norm": (add_rms_norm, added_reference)}
FACTS = {
    "meshwright.rms_norm": OpFacts(
        op_class=OpClass.NORMALIZATION,
        rule=along_last(1),
        flops=per_element(6),
        fused=True,
        torch_passes=4.5,
    ),
    "meshwright.add_rms_norm": OpFacts(
        op_class=OpClass.NORMALIZATION,
        rule=along_last(2),
        fused=True,
        backward="shared",
        torch_passes=3.5,
    ),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer, once = f"*{element}", width * (4 if element == "fp32" else 2)
    shape: dict[str, Any] = {
        "values": {"width": width},
        "warps": warps(width),
        "filled": width / block(width),
    }
    for added in (False, True):
        constants = {"BLOCK": block(width), "WIDE": tl.float32, "ADDED": added}
        tensors = dict.fromkeys(("x", "residual", "gain", "total", "out"), pointer)
        whole = {**tensors, "inverse": "*fp32", "width": "i32", "eps": "fp32"}
        moves = (2 + 2 * added) * once
        yield Build(forward_kernel, whole, constants, moves=moves, cached=once, **shape)
        tensors = dict.fromkeys(("grad_out", "grad_total", "total", "gain"), pointer)
        last = {"inverse": "*fp32", "grad_x": pointer, "grad_gain": "*fp32"}
        whole = {**tensors, **last, "rows": "i32", "width": "i32"}
        moves = (3 + added) * once
        yield Build(backward_kernel, whole, constants, moves=moves, looped=True, **shape)
