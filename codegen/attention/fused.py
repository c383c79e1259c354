"""Attention to some of the keys by a kernel that keeps no scores, where there is one.

On a CPU that is torch's own. Shapes are those of `codegen.attention.attend`; heads that share a key
are laid side by side as queries of one head, or, where order matters, each gets a copy of the key.
"""

import torch
from torch import Tensor

from meshwright.ir import torch_private


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is a kernel for them."""
    sizes = (*query.shape, key.shape[-2])
    return (
        query.device.type == "cpu"
        and key.ndim == 4
        and query.shape[-1] == value.shape[-1]
        and min(sizes) > 0
    )


def _side_by_side(x: Tensor, causal: bool) -> Tensor:
    """[b, g, r, l, e] as [b, g, r*l, e], or causal as [b, g*r, l, e]."""
    return x.flatten(1, 2) if causal else x.flatten(2, 3)


def _copies(x: Tensor, count: int, causal: bool) -> Tensor:
    """A key or value for each of the queries that are a head of their own."""
    return x.repeat_interleave(count, 1) if causal and count > 1 else x


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result [b, g, r, l, f], and the logarithms of sums [b, g, r, l, 1]."""
    count = query.shape[2]
    key, value = (_copies(x, count, causal).contiguous() for x in (key, value))
    flat = _side_by_side(query, causal)
    out, total = torch_private.flash_on_cpu(flat, key, value, causal, scale)
    return out.reshape(query.shape), total.reshape(*query.shape[:-1], 1)


def backward(
    grad: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, total: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, given the result and the sums over all keys."""
    query, key, value = inputs
    count = query.shape[2]
    flat = [_side_by_side(x, causal) for x in (grad, query, out, total)]
    copies = [_copies(x, count, causal).contiguous() for x in (key, value)]
    to_query, *others = torch_private.flash_on_cpu_backward(
        flat[0], (flat[1], copies[0], copies[1]), flat[2], flat[3].squeeze(-1), causal, scale
    )
    to_key, to_value = (_summed(x, count, causal) for x in others)
    return to_query.reshape(query.shape), to_key, to_value


def _summed(x: Tensor, count: int, causal: bool) -> Tensor:
    """What the copies of a key or value get."""
    if not causal or count == 1:
        return x
    batch, heads, *rest = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.view(batch, heads // count, count, *rest).sum(2, dtype=wide)
