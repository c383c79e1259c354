"""Attention of queries to some of the keys, with what it takes to put the parts together.

Queries are [..., g, r, l, e], keys and values [..., g, s, e]: each of g key heads serves r query
heads. A kernel does it where one fits (`codegen.attention.fused`), else plain tensors: scores are
taken for some queries at a time, so they never fill the memory. Half precision is added up in
single.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.codegen.attention import fused
from meshwright.ir.random.chances import SCORES


class PartialAttention(NamedTuple):
    """Attention to some of the keys, in the precision that is added up in."""

    out: Tensor
    """[..., g, r, l, f]"""
    total: Tensor
    """Logarithm of the sum of the exponentials of the scores [..., g, r, l, 1]; -inf where the
    query sees none of the keys."""


@dataclass(frozen=True, slots=True)
class Visible:
    """What the queries see of the keys."""

    scale: float
    mask: Tensor | None = None
    """Broadcasts to [..., g, r, l, s]: bool says where they look, numbers are added to scores."""
    first: int | None = None
    """Causal: the first query sees the keys up to this one, each further query one more."""

    def scores(self, query: Tensor, key: Tensor, rows: slice) -> Tensor:
        """Scores of some queries; -inf where they do not look."""
        whole = rows.stop - rows.start == query.shape[-2]
        part = query if whole else query[..., rows, :]
        scores = by_head(part * self.scale, key, turned=True)
        if (mask := self.rows_of_mask(rows)) is not None:
            hidden = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -torch.inf) if hidden else scores + mask
        if self.first is not None:
            later = scores.new_full(scores.shape[-2:], -torch.inf)
            scores += later.triu_(rows.start + self.first + 1)
        return scores

    @property
    def is_plain(self) -> bool:
        """Whether a kernel may do it: all keys are seen, or those up to the query's own place."""
        return self.mask is None and self.first in (None, 0)

    def rows_of_mask(self, rows: slice) -> Tensor | None:
        """The mask of some queries."""
        whole = self.mask is None or self.mask.shape[-2] == 1
        return self.mask if self.mask is None or whole else self.mask[..., rows, :]


def by_head(left: Tensor, right: Tensor, *, turned: bool = False) -> Tensor:
    """left [..., g, r, l, a] @ right [..., g, a, b], or with `turned` @ the transpose of right
    [..., g, b, a], without copies of right."""
    *lead, r, rows, inner = left.shape
    flat = right.reshape(-1, *right.shape[-2:])
    product = left.reshape(-1, r * rows, inner).bmm(flat.mT if turned else flat)
    return product.view(*lead, r, rows, product.shape[-1])


def over_rows(left: Tensor, right: Tensor) -> Tensor:
    """The sum over r and l of left [..., g, r, l, a] times right [..., g, r, l, b]."""
    *lead, r, rows, width = left.shape
    flat = left.reshape(-1, r * rows, width), right.reshape(-1, r * rows, right.shape[-1])
    return flat[0].mT.bmm(flat[1]).view(*lead, width, right.shape[-1])


def _slices(query: Tensor, keys: int) -> Iterator[slice]:
    rows = query.shape[-2]
    per_row = max(query.numel() // max(rows * query.shape[-1], 1) * keys, 1)
    step = max(SCORES // per_row, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def grouped(x: Tensor, groups: int, heads: int) -> Tensor:
    """[..., h, l, e] as [..., g, r, l, e]."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x.reshape(*x.shape[:-3], groups, heads, *x.shape[-2:])


def grouped_mask(mask: Tensor, dims: int, groups: int, heads: int) -> Tensor:
    """A mask of queries of so many dims, so that it broadcasts to [..., g, r, l, s]."""
    if mask.ndim < 2:
        mask = mask.view(1, -1)
    if dims < 3 or mask.ndim < 3:
        return mask
    split = mask.shape[-3] > 1
    return grouped(mask, groups, heads) if split else mask.unsqueeze(-3)


def as_autocast(x: Tensor) -> Tensor:
    """As torch's own attention takes it under autocast."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def wide(x: Tensor) -> Tensor:
    """In the precision that is added up in."""
    return x if x.dtype == torch.float64 else x.float()


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Visible) -> PartialAttention:
    """Attention to these keys alone."""
    causal = visible.first is not None
    if visible.is_plain and fused.fits(query, key, value, causal):
        return PartialAttention(*map(wide, fused.forward(query, key, value, causal, visible.scale)))
    query, key, value = wide(query), wide(key), wide(value)
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    total = query.new_full((*query.shape[:-1], 1), -torch.inf)
    for rows in _slices(query, key.shape[-2]):
        scores = visible.scores(query, key, rows)
        sums = scores.logsumexp(-1, keepdim=True)
        total[..., rows, :] = sums
        out[..., rows, :] = by_head((scores - _finite(sums)).exp(), value)
    return PartialAttention(out, total)


def add_part(whole: PartialAttention, part: PartialAttention) -> None:
    """Makes `whole` the attention to the keys of both, in its place and in one pass over it."""
    total = torch.logaddexp(whole.total, part.total)
    whole.out.lerp_(part.out, (part.total - _finite(total)).exp())
    whole.total.copy_(total)


def _finite(total: Tensor) -> Tensor:
    """Zero where a query sees nothing: exp(-inf - 0) is the 0 that is wanted."""
    return total.masked_fill(total == -torch.inf, 0.0)


class Gradients(NamedTuple):
    """Of the queries, keys, values and the mask, from some of the keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionStats:
    """What the backward of a part needs of the whole attention."""

    out: Tensor
    total: Tensor
    grad: Tensor
    """Of the result."""


def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    known: AttentionStats,
    wants_mask: bool,
) -> Gradients:
    """What these keys add to the gradients."""
    causal = visible.first is not None
    if visible.is_plain and fused.fits(query, key, value, causal):
        found = fused.backward(
            known.grad, (query, key, value), known.out, known.total, causal, visible.scale
        )
        to_query, to_key, to_value = map(wide, found)
        return Gradients(to_query, to_key, to_value, None)
    inputs = wide(query), wide(key), wide(value)
    return _backward(*inputs, visible, known, wants_mask)


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    known: AttentionStats,
    wants_mask: bool,
) -> Gradients:
    to_query, to_key, to_value = (torch.zeros_like(x) for x in (query, key, value))
    mask = visible.mask
    to_mask = torch.zeros_like(mask) if wants_mask and mask is not None else None
    total, grads = _finite(known.total), wide(known.grad)
    along = (grads * wide(known.out)).sum(-1, keepdim=True)
    for rows in _slices(query, key.shape[-2]):
        chances = (visible.scores(query, key, rows) - total[..., rows, :]).exp()
        grad = grads[..., rows, :]
        to_value += over_rows(chances, grad)
        to_scores = chances * (by_head(grad, value, turned=True) - along[..., rows, :])
        if to_mask is not None:
            place = Visible(1.0, to_mask).rows_of_mask(rows)
            assert place is not None
            place += to_scores.sum_to_size(place.shape)
        to_scores = to_scores * visible.scale
        to_query[..., rows, :] = by_head(to_scores, key)
        to_key += over_rows(to_scores, query[..., rows, :])
    return Gradients(to_query, to_key, to_value, to_mask)
