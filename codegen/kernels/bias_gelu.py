"""GELU of a sum with a bias, by the error function or by tanh as GPT-2 has it, in one pass."""

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


def reference(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """x: [..., width], bias: [width]; the sum is not rounded, the result has x's dtype."""
    held = held_dtype(x.dtype)
    made = torch.nn.functional.gelu(x.to(held) + bias.to(held), approximate=_kind(tanh))
    return made.to(x.dtype)


def _kind(tanh: bool) -> str:
    return "tanh" if tanh else "none"


@jit
def _share(v, TANH: tl.constexpr):
    """The part of v that GELU lets through, and how it grows with v."""
    if TANH:
        inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
        # tanh by way of the logistic function, whose exponent cannot overflow to a nan.
        share = 1.0 / (1.0 + tl.exp(-2.0 * inner))
        slope = 2.0 * share * (1.0 - share) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * v * v)
    else:
        share = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * v * v)
    return share, slope


@jit
def forward_kernel(
    x, bias, out, width, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = tl.program_id(0).to(tl.int64) * width + at
    v = tl.load(x + here, inside, 0.0).to(WIDE) + tl.load(bias + at, inside, 0.0).to(WIDE)
    share, _ = _share(v, TANH)
    tl.store(out + here, (v * share).to(out.dtype.element_ty), inside)


@jit
def backward_kernel(
    grad, x, bias, to_x, to_bias, rows,
    width, BLOCK: tl.constexpr, WIDE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Each program sums the bias's gradient over its rows; the caller sums over programs."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    added = tl.load(bias + at, inside, 0.0).to(WIDE)
    summed = tl.zeros([BLOCK], dtype=WIDE)
    for row in range(first, rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * width + at
        v = tl.load(x + here, inside, 0.0).to(WIDE) + added
        share, slope = _share(v, TANH)
        back = tl.load(grad + here, inside, 0.0).to(WIDE) * (share + v * slope)
        summed += tl.where(inside, back, 0.0)
        tl.store(to_x + here, back.to(to_x.dtype.element_ty), inside)
    tl.store(to_bias + tl.cast(first, tl.int64) * width + at, summed, inside)


@custom_op("meshwright::bias_gelu", mutates_args=())
def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU of x + bias."""
    x, width = x.contiguous(), x.shape[-1]
    if way("bias_gelu", x, width) == "torch":
        return reference(x, bias, tanh)
    out = torch.empty_like(x)
    forward_kernel[(x.numel() // width,)](
        x, bias, out, width, BLOCK=block(width), WIDE=wide(x.dtype), TANH=tanh,
        num_warps=warps(width),
    )  # fmt: skip
    return out


@bias_gelu.register_fake
def _shapes(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("meshwright::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    if way("bias_gelu", x, width) == "torch":
        held = held_dtype(x.dtype)
        total = x.to(held) + bias.to(held)
        back = torch.ops.aten.gelu_backward(grad.to(held), total, approximate=_kind(tanh))
        return back.to(x.dtype), back.reshape(rows, width).sum(0).to(bias.dtype)
    to_x, count = torch.empty_like(x), programs(x, rows)
    partial = x.new_empty(count, width, dtype=held_dtype(x.dtype))
    backward_kernel[(count,)](
        grad, x, bias, to_x, partial, rows, width, BLOCK=block(width), WIDE=wide(x.dtype),
        TANH=tanh, num_warps=warps(width),
    )  # fmt: skip
    return to_x, partial.sum(0).to(bias.dtype)


@bias_gelu_backward.register_fake
def _backward_shapes(grad: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.tanh = inputs[2]


def _differentiate(ctx, grad):
    return *bias_gelu_backward(grad, *ctx.saved_tensors, ctx.tanh), None


bias_gelu.register_autograd(_differentiate, setup_context=_save)

OPERATORS = {"bias_gelu": (bias_gelu, reference)}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer = f"*{element}"
    for tanh in (False, True):
        constants = {"BLOCK": block(width), "WIDE": tl.float32, "TANH": tanh}
        tensors = dict.fromkeys(("x", "bias", "out"), pointer)
        yield Build(forward_kernel, {**tensors, "width": "i32"}, constants)
        tensors = dict.fromkeys(("grad", "x", "bias", "to_x"), pointer)
        last = {"to_bias": "*fp32", "rows": "i32", "width": "i32"}
        yield Build(backward_kernel, {**tensors, **last}, constants)
