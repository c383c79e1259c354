"""Products with weights that are kept in few bits, in blocks along what is summed over.

A weight of `out` rows is `groups` blocks of `block` values each: `codes` [out, groups, bytes of a
block], `scale` [out, groups] and, for evenly spaced values, `zero` [out, groups]: w = scale * (code
- zero). Without `zero` codes are of four bits and number the values of NF4 (Dettmers et al. 2023,
appendix E). The wide weight is there a piece at a time, in the forward and again in the backward,
and is never kept.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

PIECE = 1 << 22
"""Values of a weight that are wide at once, at most; a row more if a row is longer."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero."""


@cache
def nf4_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the sixteen values of NF4, ascending."""
    return torch.tensor(NF4, dtype=dtype, device=device)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Returns codes [..., block] below 2**bits as uint8 [..., bytes of a block]: of four bits the
    first of two lies in the low half."""
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Returns what `packed` was given, as uint8."""
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def dequantised(
    codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype
) -> Tensor:
    """Returns the weight [out, groups * block] in a dtype."""
    found = unpacked(codes, bits)
    if zero is None:
        wide = nf4_values(dtype, codes.device)[found.int()]
    else:
        wide = found.to(dtype).sub_(zero.to(dtype).unsqueeze(-1))
    return wide.mul_(scale.to(dtype).unsqueeze(-1)).flatten(1)


def _pieces(codes: Tensor, width: int) -> list[slice]:
    rows = max(1, PIECE // max(1, width))
    return [slice(at, at + rows) for at in range(0, codes.shape[0], rows)]


def _wide(given: tuple[Tensor, Tensor, Tensor | None], rows: slice, bits: int, like: Tensor) -> Any:
    codes, scale, zero = given
    own = None if zero is None else zero[rows]
    return dequantised(codes[rows], scale[rows], own, bits, like.dtype)


@custom_op("meshwright::quantised_linear", mutates_args=())
def quantised_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int
) -> Tensor:
    """x [..., groups, block] times the weight: [..., out], in the dtype of x."""
    rows = x.reshape(-1, x.shape[-2] * x.shape[-1])
    made = x.new_empty((rows.shape[0], codes.shape[0]))
    for piece in _pieces(codes, rows.shape[1]):
        made[:, piece] = rows @ _wide((codes, scale, zero), piece, bits, x).T
    return made.view(*x.shape[:-2], codes.shape[0])


@quantised_linear.register_fake
def _shape(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    return x.new_empty((*x.shape[:-2], codes.shape[0]))


@custom_op("meshwright::quantised_linear_backward", mutates_args=())
def quantised_linear_backward(
    gradient: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, block: int
) -> Tensor:
    """The gradient of x, from that of the product [..., out]."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    groups = codes.shape[1]
    made = gradient.new_zeros((rows.shape[0], groups * block))
    for piece in _pieces(codes, groups * block):
        made.addmm_(rows[:, piece], _wide((codes, scale, zero), piece, bits, gradient))
    return made.view(*gradient.shape[:-1], groups, block)


@quantised_linear_backward.register_fake
def _back(
    gradient: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, block: int
) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], codes.shape[1], block))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scale, zero, bits = inputs
    if scale.requires_grad or (zero is not None and zero.requires_grad):
        raise ValueError(
            "scales and zero points of a quantised weight get no gradients: leave them frozen "
            "(requires_grad_(False)), and train an adapter beside the weight"
        )
    ctx.save_for_backward(codes, scale, zero)
    ctx.bits, ctx.block = bits, x.shape[-1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    made = quantised_linear_backward(gradient, *ctx.saved_tensors, ctx.bits, ctx.block)
    return made, None, None, None, None


quantised_linear.register_autograd(_backward, setup_context=_setup)
for _device in ("cpu", "cuda"):
    quantised_linear.register_autocast(_device, torch.bfloat16)

QUANTISED_LINEAR = torch.ops.meshwright.quantised_linear.default
