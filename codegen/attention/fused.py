"""Attention to some of the keys by a kernel of torch that keeps no scores, where there is one.

Shapes are those of `codegen.attention.attend`; heads that share a key are laid side by side as
queries of one head, or, where order matters, each gets a copy of the key. Heads get zeros behind
them where a kernel wants keys and values of one width: zeros add nothing to a score, and columns of
zeros are left out of what comes back.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.ir.torch_attention import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    AttentionKernel,
)

FLASH_CAPABILITY = (8, 0)
"""Of the oldest GPUs that torch has FlashAttention for."""
FLASH_WIDTH = 256
"""Of the widest heads that it is for."""
CUDA_MULTIPLE = 8
"""Of heads' widths on GPUs."""


class _Fit(NamedTuple):
    """A kernel, and how wide heads are to be for it."""

    kernel: AttentionKernel
    width: int


def _fit(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> _Fit | None:
    """The kernel for them."""
    if key.ndim != 4 or min(*query.shape, *value.shape) == 0:
        return None
    width = max(query.shape[-1], value.shape[-1])
    if query.device.type == "cpu":
        return _Fit(CPU_FLASH, width)
    if query.device.type != "cuda" or query.element_size() > 4:
        return None
    width += -width % CUDA_MULTIPLE
    by_flash = (
        query.element_size() == 2
        and width <= FLASH_WIDTH
        and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
        and not (causal and query.shape[-2] != key.shape[-2])
    )
    return _Fit(CUDA_FLASH if by_flash else CUDA_EFFICIENT, width)


def fits(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether there is a kernel for them."""
    return _fit(query, key, value, causal) is not None


def _side_by_side(x: Tensor, causal: bool) -> Tensor:
    """[b, g, r, l, e] as [b, g, r*l, e], or causal as [b, g*r, l, e]."""
    return x.flatten(1, 2) if causal else x.flatten(2, 3)


def _copies(x: Tensor, count: int, causal: bool) -> Tensor:
    """A key or value for each of the queries that are a head of their own."""
    return x.repeat_interleave(count, 1) if causal and count > 1 else x


def _as_wide(x: Tensor, width: int) -> Tensor:
    """Rows of so many elements, zeros behind the last of x's; elements of a row lie side by side,
    rows wherever they are."""
    more = width - x.shape[-1]
    if more:
        return pad(x, [0, more])
    return x if x.stride(-1) == 1 else x.contiguous()


def _narrow(x: Tensor, width: int) -> Tensor:
    """Without what was put behind the rows."""
    return x.narrow(-1, 0, width)


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result [b, g, r, l, f], and the logarithms of sums [b, g, r, l, 1]. `fits` must have been
    asked."""
    found = _fit(query, key, value, causal)
    assert found is not None
    q, k, v = (_as_wide(x, found.width) for x in _operands((query, key, value), causal))
    out, total = found.kernel.forward(q, k, v, causal, scale)
    shape = query.shape[:-1]
    made = _narrow(out, value.shape[-1]).reshape(*shape, value.shape[-1])
    return made, total.reshape(*shape, 1)


def _operands(inputs: tuple[Tensor, Tensor, Tensor], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = inputs
    count = query.shape[2]
    return (
        _side_by_side(query, causal), _copies(key, count, causal), _copies(value, count, causal),
    )  # fmt: skip


def backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, total: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, given the result and the sums over all keys."""
    query, key, value = inputs
    found = _fit(*inputs, causal)
    assert found is not None
    q, k, v = (_as_wide(x, found.width) for x in _operands(inputs, causal))
    grad, out = (_as_wide(_side_by_side(x, causal), found.width) for x in (grad, out))
    sums = _side_by_side(total, causal).squeeze(-1).contiguous()
    to_query, to_key, to_value = found.kernel.backward(grad, (q, k, v), out, sums, causal, scale)
    to_key, to_value = (
        _summed(_narrow(made, x.shape[-1]), query.shape[2], causal)
        for made, x in ((to_key, key), (to_value, value))
    )
    return _narrow(to_query, query.shape[-1]).reshape(query.shape), to_key, to_value


def _summed(x: Tensor, count: int, causal: bool) -> Tensor:
    """What the copies of a key or value get."""
    if not causal or count == 1:
        return x
    batch, heads, *rest = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.reshape(batch, heads // count, count, *rest).sum(2, dtype=wide)
