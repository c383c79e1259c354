"""Torch's kernels of attention that keep no scores and tell the sums of exponentials, so that
attention to some of the keys can be put together with that to others.

Checked on the versions that `ir.torch_private` names.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class AttentionKernel(NamedTuple):
    """Attention of [b, h, l, e] to [b, h, s, e] that keeps no scores."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    """Of queries, keys, values, whether query i sees the keys up to i alone, and the scale: the
    result [b, h, l, e], and the logarithms of the sums of exponentials of scores [b, h, l]."""
    backward: Callable[
        [Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Tensor, bool, float],
        tuple[Tensor, Tensor, Tensor],
    ]
    """Of the result's gradient, the three operands, the result, the logarithms, and the rest as
    before: gradients of the three. Result and logarithms may be those of more keys."""


_ATEN = torch.ops.aten


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, total = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, total


def _cpu_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, total: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor] = (
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *inputs, out, total, 0.0, causal, scale=scale
        )
    )
    return found


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, total, *_ = _ATEN._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return out, total


def _flash_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, total: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, keys = inputs[0].shape[-2], inputs[1].shape[-2]
    # It draws nothing, but wants where it would draw from; all samples are of one length.
    seed = grad.new_empty(2, dtype=torch.uint64)
    to_query, to_key, to_value = _ATEN._scaled_dot_product_flash_attention_backward(
        grad, *inputs, out, total, None, None, rows, keys, 0.0, causal, seed, seed.select(0, 0),
        scale=scale,
    )  # fmt: skip
    return to_query, to_key, to_value


def _efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, total, *_ = _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return out, total.narrow(-1, 0, query.shape[-2])


_EFFICIENT_ROWS = 32
"""The kernel takes logarithms in so many at a time, infinity beyond the last query's."""


def _efficient_backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, total: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total = pad(total, [0, -total.shape[-1] % _EFFICIENT_ROWS], value=torch.inf)
    seed = grad.new_empty((), dtype=torch.int64)
    to_query, to_key, to_value, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        grad, *inputs, None, out, total, seed, seed, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return to_query, to_key, to_value


CPU_FLASH = AttentionKernel(_cpu_forward, _cpu_backward)
"""On CPUs, for all dtypes."""
CUDA_FLASH = AttentionKernel(_flash_forward, _flash_backward)
"""For dtypes of two bytes on GPUs from sm_80 on, heads of a multiple of 8 up to 256 wide. Where it
is causal there are as many queries as keys: of others the last query would see all keys."""
CUDA_EFFICIENT = AttentionKernel(_efficient_forward, _efficient_backward)
"""On GPUs, for dtypes of up to four bytes, heads of a multiple of 8."""
