"""Attention with dropout whose masks belong to samples.

Each chance has the number of its place in the whole batch. On a GPU one kernel draws them and keeps
no scores (`ir.random.dropped_attention`). Where there is none for what is asked, and on CPUs,
scores are whole, of some samples at a time. Few chances are kept for the backward, which makes
many, and their numbers, again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.attention.attend import (
    Visible,
    as_autocast,
    by_head,
    grouped,
    grouped_mask,
    over_rows,
    wide,
)
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.seeds import numbers_here
from meshwright.ir.launch import INTERPRETED, TAKEN
from meshwright.ir.random.chances import KEPT, SCORES, by_operators
from meshwright.ir.random.dropout import at_once, drawn_factors
from meshwright.ir.random.dropped_attention import DroppedByKernel, why_not
from meshwright.ir.torch_private import safe_softmax


def attention(
    comm: Comm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    name: str,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    rows: int = 0,
    per_sample: int = 0,
    first: int = 0,
    sizes: tuple[int, ...] = (-1,),
    strides: tuple[int, ...] = (1,),
) -> Tensor:
    """Attention with dropout of chances [..., h, l, s], whose numbers lie as those of
    `codegen.sharded.dropout.dropout`. Samples have `rows` rows of dim 0 each, 0 if it is none of
    theirs."""
    more: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not comm.training or comm.still or dropout_p == 1 or not query.numel():
        made = scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **more)
        if not comm.training:
            return made
        return made * 0 if dropout_p == 1 else made / (1 - dropout_p)
    here = numbers_here(comm, name, per_sample)
    drawn = _Numbers(
        dropout_p, here.key, first + here.first, sizes, strides, here.held, rows, per_sample
    )
    operands = query, key, value
    if query.device.type == "cpu" and not INTERPRETED:
        if by_operators(query.shape, key.shape, masked=attn_mask is not None, kind="cpu"):
            return _by_torch(operands, is_causal, scale, drawn)
        return _by_scores(operands, attn_mask, is_causal, scale, drawn)
    query, key, value = operands = as_autocast(query), as_autocast(key), as_autocast(value)
    numbered = drawn.key, drawn.first, sizes, strides, drawn.held, per_sample
    if why := why_not(query, key, value, attn_mask, drawn.first, sizes, strides, per_sample):
        TAKEN["dropped_attention", why] += 1
        return _by_scores(operands, attn_mask, is_causal, scale, drawn)
    by_kernel: Callable[..., Tensor] = DroppedByKernel.apply
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    return by_kernel(*operands, attn_mask, is_causal, scale, dropout_p, *numbered)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Those of chances [..., h, l, s]."""

    p: float
    key: int
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    held: Tensor | None
    rows: int
    """Of dim 0, that a sample has; 0 if it is no dim of samples."""
    per_sample: int

    def factors(self, chances: Tensor, rows: slice | None) -> Tensor:
        """What chances of these rows of dim 0 are multiplied by."""
        first = self.first + (rows.start // self.rows * self.per_sample if rows else 0)
        return drawn_factors(
            chances, self.p, self.key, first, self.sizes, self.strides, self.held, self.per_sample
        )

    def chunks(self, count: int, scores: int) -> Iterator[slice | None]:
        """Rows of dim 0, of which there are `count`, that are done together: each has so many
        scores. None: all."""
        rows = self.rows or count
        step = max(SCORES // max(scores * rows, 1), 1) * rows
        if step >= count:
            yield None
        else:
            yield from (slice(at, min(at + step, count)) for at in range(0, count, step))


def _by_torch(
    operands: tuple[Tensor, ...], is_causal: bool, scale: float | None, drawn: _Numbers
) -> Tensor:
    """By torch's own operators, whose backward takes less of the host than one in Python. Query
    heads of a key head are rows of one product, and chances lie as they do [b, h, l, s]."""
    query, key, value = (as_autocast(x) for x in operands)
    (*_, rows, width), keys = query.shape, key.shape[-2]
    heads = query.shape[-3] // key.shape[-3]
    with _as_they_are(query):
        left = wide(query).reshape(-1, heads * rows, width)
        right = wide(key).reshape(-1, keys, width)
        none = left.new_zeros(1, 1)
        later = _later_of(heads, rows, keys, left) if is_causal else none
        scale = 1 / sqrt(width) if scale is None else scale
        scores = torch.baddbmm(later, left, right.mT, alpha=scale)
        chances = scores.softmax(-1)
        made = (chances * drawn.factors(chances, None)).bmm(
            wide(value).reshape(-1, keys, value.shape[-1])
        )
    return made.view(*query.shape[:-1], value.shape[-1]).to(query.dtype)


def _later_of(heads: int, rows: int, keys: int, like: Tensor) -> Tensor:
    """-inf where a key is later than the query, else 0: [heads x rows, keys]."""
    made = (_later if at_once(like) else _later.__wrapped__)(heads, rows, keys, like.dtype)
    return made.to(like.device)


@lru_cache(maxsize=4)
def _later(heads: int, rows: int, keys: int, dtype: torch.dtype) -> Tensor:
    """The same on the CPU. Nobody writes to it, and the last few are kept: of few scores each, as
    others are not made by operators (`ir.random.chances.by_operators`)."""
    later = torch.full((rows, keys), -torch.inf, dtype=dtype, device="cpu").triu_(1)
    return later if heads == 1 else later.repeat(heads, 1)


def _by_scores(
    operands: tuple[Tensor, ...],
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    drawn: _Numbers,
) -> Tensor:
    query, key, value = (as_autocast(x) for x in operands)
    groups = key.shape[-3] if key.ndim > 2 else 1
    heads = query.shape[-3] // groups if query.ndim > 2 else 1
    seen = Visible(
        1 / sqrt(query.shape[-1]) if scale is None else scale,
        None if mask is None else grouped_mask(mask, query.ndim, groups, heads),
        0 if is_causal else None,
    )
    apply: Callable[..., Tensor] = _DroppedAttention.apply
    made = apply(grouped(query, groups, heads), key, value, seen.mask, seen, drawn)
    return made.view(*query.shape[:-1], value.shape[-1])


class _Chances(NamedTuple):
    """Of some rows of dim 0, in the precision that is added up in."""

    rows: slice | None
    """None: all."""
    all: Tensor
    dropped: Tensor


def _chances(query: Tensor, key: Tensor, seen: Visible, drawn: _Numbers) -> Iterator[_Chances]:
    scores = query[:1].numel() // query.shape[-1] * key.shape[-2]
    for rows in drawn.chunks(query.shape[0], scores):
        yield _chances_of(rows, query, key, seen, drawn)  # no name here holds them longer


def _chances_of(
    rows: slice | None, query: Tensor, key: Tensor, seen: Visible, drawn: _Numbers
) -> _Chances:
    own = replace(seen, mask=_of_mask(seen.mask, rows, query))
    every = slice(0, query.shape[-2])
    found = own.scores(wide(_of_rows(query, rows)), wide(_of_rows(key, rows)), every)
    # Queries that see nothing find zeros, as in torch's own attention.
    made = found.softmax(-1) if own.mask is None else safe_softmax(found)
    del found
    return _Chances(rows, made, made * drawn.factors(made, rows))


def _of_rows(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[rows]


def _of_mask(mask: Tensor | None, rows: slice | None, query: Tensor) -> Tensor | None:
    """The part of a mask for rows of dim 0 of the queries."""
    whole = mask is None or mask.ndim < query.ndim or mask.shape[0] == 1
    return mask if mask is None or whole else _of_rows(mask, rows)


class _DroppedAttention(torch.autograd.Function):
    """Queries [..., g, r, l, e], keys and values [..., g, s, e], mask [..., g, r, l, s]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: Visible,
        drawn: _Numbers,
    ) -> Tensor:  # fmt: skip
        query, key, value = (x.contiguous() for x in (query, key, value))
        made, kept = list[Tensor](), list[Tensor]()
        with _as_they_are(query):
            for part in _chances(query, key, seen, drawn):
                made.append(by_head(part.dropped, wide(_of_rows(value, part.rows))))
                if part.rows is None and part.all.numel() <= KEPT:
                    kept = [part.all, part.dropped]
                del part  # before the next is made
        ctx.rest = seen.scale, seen.first, drawn
        ctx.save_for_backward(query, key, value, mask, *kept)
        return _together(made).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, *kept = ctx.saved_tensors
        scale, first, drawn = ctx.rest
        to_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        found: tuple[list[Tensor], ...] = [], [], []
        with _as_they_are(query):
            whole = [_Chances(None, *kept)] if kept else None
            for part in whole or _chances(query, key, Visible(scale, mask, first), drawn):
                grad = wide(_of_rows(grads[0], part.rows))
                q, k, v = (wide(_of_rows(x, part.rows)) for x in (query, key, value))
                # Of a chance that was dropped or kept the gradient is one of what became of it.
                to_scores = by_head(grad, v, turned=True).mul_(part.dropped)
                to_scores.addcmul_(part.all, to_scores.sum(-1, keepdim=True), value=-1)
                if to_mask is not None:
                    place = _of_mask(to_mask, part.rows, query)
                    assert place is not None
                    place += to_scores.sum_to_size(place.shape)
                to_scores.mul_(scale)
                found[0].append(by_head(to_scores, k))
                found[1].append(over_rows(to_scores, q))
                found[2].append(over_rows(part.dropped, grad))
                del part, to_scores  # before the next is made
        to_query, to_key, to_value = (_together(parts).to(query.dtype) for parts in found)
        return to_query, to_key, to_value, to_mask, None, None


def _as_they_are(x: Tensor) -> AbstractContextManager[None]:
    """Operands keep their dtypes, under autocast too."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if cast else nullcontext()


def _together(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
