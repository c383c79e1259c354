"""Rotary position embedding: pairs of a head's halves are turned by angles of their position."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.codegen.kernels.launch import Build, block, jit, tl, way, wide


def reference(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x: [batch, heads, positions, 2 h]; cosine and sine: [batch or 1, positions, 2 h], whose
    halves are equal."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cosine.unsqueeze(1) + turned * sine.unsqueeze(1)


@jit
def turn_kernel(
    x, cosine, sine, out, heads, positions,
    half, per_sample, sign, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program turns a position of a head; with sign -1 back. `per_sample`: elements of the
    angles from sample to sample, 0 if all have the same."""
    row = tl.program_id(0).to(tl.int64)
    position = row % positions
    sample = row // (positions * heads)
    at = tl.arange(0, BLOCK)
    inside = at < half
    angle = sample * per_sample + position * 2 * half + at
    c = tl.load(cosine + angle, inside, 0.0).to(WIDE)
    s = tl.load(sine + angle, inside, 0.0).to(WIDE) * sign
    here = row * 2 * half + at
    first = tl.load(x + here, inside, 0.0).to(WIDE)
    second = tl.load(x + here + half, inside, 0.0).to(WIDE)
    tl.store(out + here, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(out + here + half, (second * c + first * s).to(out.dtype.element_ty), inside)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, sign: float) -> Tensor:
    x, cosine, sine = x.contiguous(), cosine.contiguous(), sine.contiguous()
    if way("rotary", x, x.shape[-1]) == "torch":
        return reference(x, cosine, sine * sign)
    batch, heads, positions, size = x.shape
    out = torch.empty_like(x)
    turn_kernel[(batch * heads * positions,)](
        x, cosine, sine, out, heads, positions, size // 2,
        positions * size if cosine.shape[0] > 1 else 0, sign,
        BLOCK=block(size // 2), WIDE=wide(x.dtype), num_warps=1,
    )  # fmt: skip
    return out


@custom_op("meshwright::rotary", mutates_args=())
def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x turned by its positions' angles, which have no gradient."""
    return _turned(x, cosine, sine, 1.0)


@custom_op("meshwright::rotary_backward", mutates_args=())
def rotary_backward(grad: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The gradient is turned back."""
    return _turned(grad, cosine, sine, -1.0)


@rotary.register_fake
@rotary_backward.register_fake
def _shapes(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _differentiate(ctx, grad):
    return rotary_backward(grad, *ctx.saved_tensors), None, None


rotary.register_autograd(_differentiate, setup_context=_save)

OPERATORS = {"rotary": (rotary, reference)}


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16, and heads of `width`."""
    sizes = dict.fromkeys(("heads", "positions", "half", "per_sample"), "i32")
    tensors = dict.fromkeys(("x", "cosine", "sine", "out"), f"*{element}")
    constants = {"BLOCK": block(width // 2), "WIDE": tl.float32}
    yield Build(turn_kernel, {**tensors, **sizes, "sign": "fp32"}, constants)
