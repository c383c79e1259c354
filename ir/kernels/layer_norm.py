"""LayerNorm of a sum: a residual is added, the sum is kept and its norm scaled, in one pass."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import along_last
from meshwright.ir.launch import Build, block, held_dtype, jit, programs, tl, warps, way, wide
from meshwright.ir.trace.flat_trace import RawOp
from meshwright.ir.trace.flow import Flow, Match, Miss, first_free, kernel_call, residual_sum


def reference(
    x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(x + residual, its norm times gain plus bias); [..., width], gain and bias are [width]."""
    total, out, _, _ = _by_torch(x, residual, gain, bias, eps)
    return total, out


def _by_torch(
    x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Also the mean and 1 / the deviation per row."""
    total = x + residual
    held = total.to(held_dtype(total.dtype))
    strength, shift = gain.to(held.dtype), bias.to(held.dtype)
    out, mean, inverse = torch.native_layer_norm(held, held.shape[-1:], strength, shift, eps)
    dtype = torch.promote_types(total.dtype, gain.dtype)
    return total, out.to(dtype), mean.squeeze(-1), inverse.squeeze(-1)


@jit
def forward_kernel(
    x, residual, gain, bias, total, out,
    mean, inverse, width, eps, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = row * width + at
    added = tl.load(x + here, inside, 0.0).to(WIDE) + tl.load(residual + here, inside, 0.0).to(WIDE)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + here, rounded, inside)
    held = rounded.to(WIDE)
    middle = tl.sum(held, 0) / width
    apart = tl.where(inside, held - middle, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, 0) / width + eps)
    tl.store(mean + row, middle)
    tl.store(inverse + row, scale)
    strength = tl.load(gain + at, inside, 0.0).to(WIDE)
    shift = tl.load(bias + at, inside, 0.0).to(WIDE)
    tl.store(out + here, (apart * scale * strength + shift).to(out.dtype.element_ty), inside)


@jit
def backward_kernel(
    grad_out, grad_total, total, gain, mean,
    inverse, grad_x, grad_gain, grad_bias, rows,
    width, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each program sums gradients of gain and bias over its rows; the caller over programs."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    strength = tl.load(gain + at, inside, 0.0).to(WIDE)
    to_gain = tl.zeros([BLOCK], dtype=WIDE)
    to_bias = tl.zeros([BLOCK], dtype=WIDE)
    for row in range(first, rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * width + at
        scale = tl.load(inverse + row)
        held = tl.load(total + here, inside, 0.0).to(WIDE)
        normed = tl.where(inside, (held - tl.load(mean + row)) * scale, 0.0)
        grad = tl.load(grad_out + here, inside, 0.0).to(WIDE)
        to_gain += grad * normed
        to_bias += grad
        scaled = grad * strength
        along = tl.sum(scaled * normed, 0) / width
        level = tl.sum(scaled, 0) / width
        passed = tl.load(grad_total + here, inside, 0.0).to(WIDE)
        back = scale * (scaled - normed * along - level) + passed
        tl.store(grad_x + here, back.to(grad_x.dtype.element_ty), inside)
    there = tl.cast(first, tl.int64) * width + at
    tl.store(grad_gain + there, to_gain, inside)
    tl.store(grad_bias + there, to_bias, inside)


@custom_op("meshwright::add_layer_norm", mutates_args=())
def add_layer_norm(
    x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + residual, its norm times gain plus bias, and per row the mean and 1 / the deviation)."""
    x, residual, width = x.contiguous(), residual.contiguous(), x.shape[-1]
    if way("layer_norm", x, width) == "torch":
        return _by_torch(x, residual, gain, bias, eps)
    total, out, mean, inverse = _shapes(x, residual, gain, bias, eps)
    forward_kernel[(x.numel() // width,)](
        x, residual, gain, bias, total, out, mean, inverse, width, eps,
        BLOCK=block(width), WIDE=wide(total.dtype), num_warps=warps(width),
    )  # fmt: skip
    return total, out, mean, inverse


@add_layer_norm.register_fake
def _shapes(
    x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = torch.promote_types(x.dtype, residual.dtype)
    total = x.new_empty(x.shape, dtype=summed)
    out = x.new_empty(x.shape, dtype=torch.promote_types(summed, gain.dtype))
    mean, inverse = (x.new_empty(x.shape[:-1], dtype=held_dtype(summed)) for _ in range(2))
    return total, out, mean, inverse


@custom_op("meshwright::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    grad_total: Tensor, grad_out: Tensor, total: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, which are the residual's too, of the gain, and of the bias."""
    width = total.shape[-1]
    rows = total.numel() // width if width else 0
    if way("layer_norm", total, width) == "torch":
        return _backward_reference(grad_total, grad_out, total, gain, mean, inverse)
    grad_total, grad_out = grad_total.contiguous(), grad_out.contiguous()
    grad_x = torch.empty_like(total)
    count = programs(total, rows, width)
    to_gain, to_bias = inverse.new_empty(count, width), inverse.new_empty(count, width)
    backward_kernel[(count,)](
        grad_out, grad_total, total, gain, mean, inverse, grad_x, to_gain, to_bias, rows, width,
        BLOCK=block(width), WIDE=wide(total.dtype), num_warps=warps(width),
    )  # fmt: skip
    return grad_x, to_gain.sum(0).to(gain.dtype), to_bias.sum(0).to(gain.dtype)


def _backward_reference(
    grad_total: Tensor, grad_out: Tensor, total: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = inverse.unsqueeze(-1)
    normed = (total.to(scale.dtype) - mean.unsqueeze(-1)) * scale
    grad = grad_out.to(scale.dtype)
    scaled = grad * gain
    along, level = (scaled * normed).mean(-1, keepdim=True), scaled.mean(-1, keepdim=True)
    back = scale * (scaled - normed * along - level) + grad_total
    over = tuple(range(total.ndim - 1))
    to_gain, to_bias = (grad * normed).sum(over), grad.sum(over)
    return back.to(total.dtype), to_gain.to(gain.dtype), to_bias.to(gain.dtype)


@layer_norm_backward.register_fake
def _backward_shapes(
    grad_total: Tensor, grad_out: Tensor, total: Tensor, gain: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(total), torch.empty_like(gain), torch.empty_like(gain)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[0], inputs[2], output[2], output[3])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2], output[3])


def _differentiate(ctx, grad_total, grad_out, *_):
    if grad_out is None:  # nobody reads the norm
        return grad_total, grad_total, None, None, None
    grad_total = torch.zeros_like(ctx.saved_tensors[0]) if grad_total is None else grad_total
    back, to_gain, to_bias = layer_norm_backward(grad_total, grad_out, *ctx.saved_tensors)
    return back, back, to_gain, to_bias, None


add_layer_norm.register_autograd(_differentiate, setup_context=_save)


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
    place = first_free(flow, add, op, gain, bias)
    return Match((add, op), kernel_call("add_layer_norm", given, op, outputs), place)


OPERATORS = {"add_layer_norm": (add_layer_norm, reference)}
FACTS = {
    "meshwright.add_layer_norm": OpFacts(
        op_class=OpClass.NORMALIZATION,
        rule=along_last(2),
        fused=True,
        backward="shared",
        torch_passes=1.3,
    ),
}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer, constants = f"*{element}", {"BLOCK": block(width), "WIDE": tl.float32}
    once = width * (4 if element == "fp32" else 2)
    shape: dict[str, Any] = {
        "values": {"width": width},
        "warps": warps(width),
        "filled": width / block(width),
    }
    tensors = dict.fromkeys(("x", "residual", "gain", "bias", "total", "out"), pointer)
    rows = {"mean": "*fp32", "inverse": "*fp32"}
    whole = {**tensors, **rows, "width": "i32", "eps": "fp32"}
    yield Build(forward_kernel, whole, constants, moves=4 * once, cached=2 * once, **shape)
    tensors = dict.fromkeys(("grad_out", "grad_total", "total", "gain"), pointer)
    last = {"grad_x": pointer, "grad_gain": "*fp32", "grad_bias": "*fp32"}
    whole = {**tensors, **rows, **last, "rows": "i32", "width": "i32"}
    yield Build(backward_kernel, whole, constants, moves=4 * once, looped=True, **shape)
