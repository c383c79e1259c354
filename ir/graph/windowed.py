"""Attention that looks back over a window, block by block: only the keys that a block of queries
sees are touched, so that neither scores nor masks grow with the square of the length.

With sinks (gpt-oss) each head has one more score, which takes its share of the softmax and adds
nothing: one more key, whose product with a feature that queries have besides is that score, with a
value of zeros. So no mask has heads, and without a window there is none.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from meshwright.ir.graph.own_operators import LIBRARY

BLOCK = 512
"""Queries of a block, at least; as many as a wider window has."""
ROOM = 8
"""Features that are added for sinks: kernels take heads of a multiple of that."""

LIBRARY.define(
    "windowed_attention(Tensor query, Tensor key, Tensor value, int window, Tensor? sinks=None,"
    " float? scale=None) -> Tensor"
)


def seen_blocks(queries: int, window: int, first: int = 0) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that some query of each sees.

    The first query sees the last `window` of the keys up to number `first`, each further one a key
    more.
    """
    size = max(window, BLOCK)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), slice(max(0, first + start - window + 1), first + stop)


def windowed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    sinks: Tensor | None = None,
    scale: float | None = None,
    first: int = 0,
) -> Tensor:
    """Attention of [..., h, l, e] to [..., g, s, e] and [..., g, s, f], sinks [h]: [..., h, l, f].

    `window` and `first` are those of `seen_blocks`; window 0: each query sees all keys up to its
    own place, and there is no `first`. g divides h.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width = value.shape[-1]
    if sinks is not None:
        query, key = _with_room(query, sinks / scale), _with_room(key, None)
    if width < key.shape[-1]:
        # Of values that are narrower than keys most kernels make whole scores.
        value = pad(value, [0, key.shape[-1] - width])
    if not window:
        attend = partial(
            scaled_dot_product_attention, scale=scale, is_causal=True,
            enable_gqa=query.shape[-3] != key.shape[-3],
        )  # fmt: skip
        if sinks is None:
            return attend(query, key, value)[..., :width]
        # A query before all others, so that the sink is the key of its place.
        shifted = attend(pad(query, [0, 0, 1, 0]), *_with_sink(key, value))
        return shifted[..., 1:, :width]
    made, masks = list[Tensor](), dict[tuple[int, int, int], Tensor]()
    for rows, columns in seen_blocks(query.shape[-2], window, first):
        k, v = key[..., columns, :], value[..., columns, :]
        shape = rows.stop - rows.start, columns.stop - columns.start
        at = first + rows.start - columns.start
        if (mask := masks.get((*shape, at))) is None:
            mask = _band(*shape, at, window, query.device)
            mask = mask if sinks is None else pad(mask, [1, 0], value=True)
            masks[*shape, at] = mask
        k, v = (k, v) if sinks is None else _with_sink(k, v)
        made.append(_masked(query[..., rows, :], k, v, mask, scale)[..., :width])
    return made[0] if len(made) == 1 else torch.cat(made, -2)


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention where all heads have one mask.

    GPUs' kernels that take a mask want as many heads of keys as of queries, else whole scores are
    made and kept. So heads that share keys are a sample of their own, [n * g, h / g, l, e], in
    which these keys are expanded without a copy.
    """
    shared = query.shape[-3] // key.shape[-3]
    q = query.reshape(-1, shared, *query.shape[-2:])
    k, v = (
        x.reshape(-1, 1, *x.shape[-2:]).expand(-1, shared, -1, -1) for x in (key, value)
    )  # fmt: skip
    made = scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return made.reshape(*query.shape[:-1], value.shape[-1])


def _band(rows: int, columns: int, first: int, window: int, device: torch.device) -> Tensor:
    """Which keys queries see of which the first sees the last `window` up to number `first`."""
    behind = (
        torch.arange(rows, device=device)[:, None] + first - torch.arange(columns, device=device)
    )
    return (behind >= 0) & (behind < window)


def _with_room(x: Tensor, last: Tensor | None) -> Tensor:
    """x [..., h, l, e] with more features, as many as kernels want: zeros, but for the last of
    each head, if that is given."""
    if last is None:
        return pad(x, [0, ROOM])
    column = last.to(x.dtype)[:, None, None].expand(*x.shape[:-1], 1)
    return torch.cat([pad(x, [0, ROOM - 1]), column], -1)


def _with_sink(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A key before all others that has the last feature alone, with a value of zeros."""
    sink = pad(key.new_ones(1), [key.shape[-1] - 1, 0]).expand(*key.shape[:-2], 1, -1)
    return torch.cat([sink, key], -2), pad(value, [0, 0, 1, 0])


def _windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int, sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    return windowed(query, key, value, window, sinks, scale)


LIBRARY.impl("windowed_attention", _windowed_attention, "CompositeImplicitAutograd")
WINDOWED_ATTENTION = torch.ops.meshwright.windowed_attention.default
