"""RMSNorm of a sum: a residual is added, the sum is kept and its norm scaled, in one pass."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.codegen.kernels.launch import (
    Build,
    block,
    held_dtype,
    jit,
    programs,
    tl,
    warps,
    way,
    wide,
)


def reference(x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm times the gain); [..., width] each, the gain is [width]."""
    total = x + residual
    held = total.to(held_dtype(total.dtype))
    inverse = torch.rsqrt(held.square().mean(-1, keepdim=True) + eps)
    return total, (held * inverse * gain).to(x.dtype)


@jit
def forward_kernel(
    x, residual, gain, total, out, inverse,
    width, eps, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = row * width + at
    added = tl.load(x + here, inside, 0.0).to(WIDE) + tl.load(residual + here, inside, 0.0).to(WIDE)
    rounded = added.to(total.dtype.element_ty)
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
    WIDE: tl.constexpr,
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
        passed = tl.load(grad_total + here, inside, 0.0).to(WIDE)
        back = scale * (scaled - normed * along) + passed
        tl.store(grad_x + here, back.to(grad_x.dtype.element_ty), inside)
    tl.store(grad_gain + tl.cast(first, tl.int64) * width + at, summed, inside)


@custom_op("meshwright::rms_norm", mutates_args=())
def rms_norm(
    x: Tensor, residual: Tensor, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, its norm times the gain, 1 / its root mean square for the backward)."""
    x, residual, width = x.contiguous(), residual.contiguous(), x.shape[-1]
    rows = x.numel() // width
    held = held_dtype(x.dtype)
    if way(x, width) == "torch":
        total, out = reference(x, residual, gain, eps)
        mean = total.to(held).square().mean(-1)
        return total, out, torch.rsqrt(mean + eps).reshape(rows)
    total, out = torch.empty_like(x), torch.empty_like(x)
    inverse = x.new_empty(rows, dtype=held)
    forward_kernel[(rows,)](
        x, residual, gain, total, out, inverse, width, eps,
        BLOCK=block(width), WIDE=wide(x.dtype), num_warps=warps(width),
    )  # fmt: skip
    return total, out, inverse


@rms_norm.register_fake
def _shapes(x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like), x.new_empty(rows, dtype=held_dtype(x.dtype))


@custom_op("meshwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad_total: Tensor, grad_out: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, which are the residual's too, and of the gain."""
    width = total.shape[-1]
    rows = total.numel() // width
    if way(total, width) == "torch":
        return _backward_reference(grad_total, grad_out, total, gain, inverse)
    grad_total, grad_out = grad_total.contiguous(), grad_out.contiguous()
    grad_x = torch.empty_like(total)
    count = programs(total, rows)
    partial = inverse.new_empty(count, width)
    backward_kernel[(count,)](
        grad_out, grad_total, total, gain, inverse, grad_x, partial, rows, width,
        BLOCK=block(width), WIDE=wide(total.dtype), num_warps=warps(width),
    )  # fmt: skip
    return grad_x, partial.sum(0).to(gain.dtype)


def _backward_reference(
    grad_total: Tensor, grad_out: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    scale = inverse.reshape(*total.shape[:-1], 1)
    normed, grad = total.to(scale.dtype) * scale, grad_out.to(scale.dtype)
    scaled = grad * gain
    back = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) + grad_total
    over = tuple(range(total.ndim - 1))
    return back.to(total.dtype), (grad * normed).sum(over).to(gain.dtype)


@rms_norm_backward.register_fake
def _backward_shapes(
    grad_total: Tensor, grad_out: Tensor, total: Tensor, gain: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(total), torch.empty_like(gain)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, grad_total, grad_out, _):
    total, gain, inverse = ctx.saved_tensors
    back, to_gain = rms_norm_backward(grad_total, grad_out, total, gain, inverse)
    return back, back, to_gain, None


rms_norm.register_autograd(_differentiate, setup_context=_save)


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer, constants = f"*{element}", {"BLOCK": block(width), "WIDE": tl.float32}
    tensors = dict.fromkeys(("x", "residual", "gain", "total", "out"), pointer)
    yield Build(
        forward_kernel, {**tensors, "inverse": "*fp32", "width": "i32", "eps": "fp32"}, constants
    )
    tensors = dict.fromkeys(("grad_out", "grad_total", "total", "gain"), pointer)
    last = {"inverse": "*fp32", "grad_x": pointer, "grad_gain": "*fp32"}
    yield Build(backward_kernel, {**tensors, **last, "rows": "i32", "width": "i32"}, constants)
