"""Attention with dropout whose masks belong to samples.

On a GPU torch's own attention draws them, which one generator seeds for each sample in turn, on one
rank's heads. Elsewhere scores are whole, of some samples at a time, and each chance has the number
of its place in the whole batch. Chances are not kept: the backward makes them and their numbers
again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from meshwright.codegen.attention.attend import (
    SCORES,
    Visible,
    as_autocast,
    by_head,
    grouped,
    grouped_mask,
    over_rows,
    wide,
)
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.seeds import default_generator, key_of, seed_of
from meshwright.ir.torch_private import safe_softmax, softmax_backward


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
    axes: tuple[str, ...] = (),
    per_sample: int = 0,
    first: int = 0,
    sizes: tuple[int, ...] = (-1,),
    strides: tuple[int, ...] = (1,),
) -> Tensor:
    """Attention with dropout of chances [..., h, l, s], whose numbers lie as those of
    `codegen.sharded.dropout.dropout`. Samples have `rows` rows of dim 0 each, 0 if it is none of
    theirs; model axes that split the result are `axes`."""

    def plain(parts: tuple[Tensor, ...], mask: Tensor | None, p: float) -> Tensor:
        return scaled_dot_product_attention(
            *parts, mask, p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    operands = (query, key, value)
    if not comm.training or not query.numel():
        return plain(operands, attn_mask, 0.0)
    if comm.still:
        return plain(operands, attn_mask, 0.0) / (1 - dropout_p)
    if query.is_cuda:
        return _by_sample(comm, operands, attn_mask, (name, rows, axes), dropout_p, plain)
    drawn = _Numbers(
        dropout_p, key_of(comm, name), first + comm.sample_offset * per_sample, sizes, strides,
        rows, per_sample,
    )  # fmt: skip
    return _by_scores(operands, attn_mask, is_causal, scale, drawn)


def _by_sample(
    comm: Comm,
    operands: tuple[Tensor, ...],
    mask: Tensor | None,
    drawn: tuple[str, int, tuple[str, ...]],
    p: float,
    plain: Callable[[tuple[Tensor, ...], Tensor | None, float], Tensor],
) -> Tensor:
    name, rows, axes = drawn
    count = operands[0].shape[0] // rows if rows else 1
    if not rows:
        samples, masks = [operands], [mask]
    else:
        samples = list(zip(*(x.split(rows) for x in operands), strict=True))
        shared = mask is None or mask.ndim < operands[0].ndim or mask.shape[0] == 1
        masks = [mask] * count if mask is None or shared else list(mask.split(rows))
    made = []
    with default_generator(operands[0].device) as generator:
        for index, (parts, part) in enumerate(zip(samples, masks, strict=True)):
            sample = comm.sample_offset + index if rows else -1
            generator.manual_seed(seed_of(comm, name, sample, axes))
            made.append(plain(parts, part, p))
    return torch.cat(made) if len(made) > 1 else made[0]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Those of chances [..., h, l, s]."""

    p: float
    key: int
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    """Of dim 0, that a sample has; 0 if it is no dim of samples."""
    per_sample: int

    def factors(self, chances: Tensor, row: int) -> Tensor:
        """What chances that begin at this row of dim 0 are multiplied by."""
        first = self.first + (row // self.rows * self.per_sample if self.rows else 0)
        made: Tensor = torch.ops.meshwright.dropout_factors(
            chances, self.p, self.key, first, self.sizes, self.strides
        )
        return made

    def chunks(self, count: int, scores: int) -> Iterator[slice]:
        """Rows of dim 0, of which there are `count`, that are done together: each has so many
        scores."""
        rows = self.rows or count
        step = max(SCORES // max(scores * rows, 1), 1) * rows
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))


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


@dataclass(frozen=True, slots=True)
class _Part:
    """What some rows of dim 0 compute, in the precision that is added up in."""

    query: Tensor
    key: Tensor
    value: Tensor
    chances: Tensor
    factors: Tensor
    mask_rows: slice | None
    """Of the mask, if it has rows of dim 0."""


def _parts(
    query: Tensor, key: Tensor, value: Tensor, seen: Visible, drawn: _Numbers
) -> Iterator[tuple[slice, _Part]]:
    mask, count = seen.mask, query.shape[0]
    rows_of_mask = mask is not None and mask.ndim == query.ndim and mask.shape[0] > 1
    scores = query[:1].numel() // query.shape[-1] * key.shape[-2]
    for rows in drawn.chunks(count, scores):
        own = mask[rows] if mask is not None and rows_of_mask else mask
        q = wide(query[rows])
        k, v = (wide(x if drawn.rows == 0 else x[rows]) for x in (key, value))
        found = Visible(seen.scale, own, seen.first).scores(q, k, slice(0, q.shape[-2]))
        # Rows that see nothing are zeros, as in torch's own attention.
        chances = found.softmax(-1) if own is None else safe_softmax(found)
        factors = drawn.factors(chances, rows.start)
        yield rows, _Part(q, k, v, chances, factors, rows if rows_of_mask else None)


class _DroppedAttention(torch.autograd.Function):
    """Queries [..., g, r, l, e], keys and values [..., g, s, e], mask [..., g, r, l, s]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: Visible,
        drawn: _Numbers,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.causal, ctx.drawn = seen.scale, seen.first, drawn
        with torch.autocast(query.device.type, enabled=False):
            made = [
                by_head(part.chances.mul_(part.factors), part.value)
                for _, part in _parts(query, key, value, seen, drawn)
            ]
        return _whole(made).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        seen = Visible(ctx.scale, mask, ctx.causal)
        to_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        found: tuple[list[Tensor], ...] = [], [], []
        with torch.autocast(query.device.type, enabled=False):
            for rows, part in _parts(query, key, value, seen, ctx.drawn):
                grad, chances = wide(grads[0][rows]), part.chances
                to_chances = by_head(grad, part.value.transpose(-1, -2)).mul_(part.factors)
                to_scores = softmax_backward(to_chances, chances)
                if to_mask is not None:
                    place = to_mask if part.mask_rows is None else to_mask[part.mask_rows]
                    place += to_scores.sum_to_size(place.shape)
                to_scores = to_scores * seen.scale
                found[0].append(by_head(to_scores, part.key))
                found[1].append(over_rows(to_scores, part.query))
                found[2].append(over_rows(chances.mul_(part.factors), grad))
        to_query, to_key, to_value = (_whole(parts).to(query.dtype) for parts in found)
        return to_query, to_key, to_value, to_mask, None, None


def _whole(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
