"""Attention whose queries and keys are split along the sequence: keys and values go round.

Each rank attends with its queries to the keys it holds, hands them to the next rank and takes those
of the rank before, until it has seen all. In backward keys and values go round again, and behind
them their gradients, which end where the keys belong. A message travels while a part is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.attention.attend import (
    AttentionStats,
    Gradients,
    PartialAttention,
    add_part,
    as_autocast,
    attend,
    attend_backward,
    grouped,
    grouped_mask,
    wide,
)
from meshwright.codegen.attention.ring_ownership import Ring, Share
from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.errors import PlanError


class _Attention(torch.autograd.Function):
    """Queries [..., g, r, l, e], keys and values [..., g, s, e], mask [..., g, r, l, s]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring
    ) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            found = _forward(query, key, value, mask, ring)
        out = found.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, found.total)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, total = ctx.saved_tensors
        known = AttentionStats(out, total, grads[0])
        way_back = _Backward(ctx.ring, query, mask, known, ctx.needs_input_grad[3])
        with torch.autocast(query.device.type, enabled=False):
            to_query, to_key, to_value, to_mask = way_back.run(key, value)
        narrow = query.dtype
        return to_query.to(narrow), to_key.to(narrow), to_value.to(narrow), to_mask, None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring
) -> PartialAttention:
    found = _nothing(query, value)
    begun: list[range] = []
    for step, its_key, its_value in ring.rounds(key, value):
        for rows, columns, visible in ring.pieces(ring.owner(step), mask):
            keys, values = its_key[..., columns, :], its_value[..., columns, :]
            part = attend(query[..., rows, :], keys, values, visible)
            here = PartialAttention(*(x[..., rows, :] for x in found))
            its = range(*rows.indices(query.shape[-2]))
            if any(its.start < old.stop and old.start < its.stop for old in begun):
                add_part(here, part)
            else:  # these queries have found nothing yet
                begun.append(its)
                for whole, new in zip(here, part, strict=True):
                    whole.copy_(new)
    return found


@dataclass(frozen=True)
class _Backward:
    """The way back: keys and values go round, their gradients one step behind."""

    ring: Ring
    query: Tensor
    mask: Tensor | None
    known: AttentionStats
    wants_mask: bool

    def run(self, key: Tensor, value: Tensor) -> Gradients:
        ring, to_query = self.ring, torch.zeros_like(wide(self.query))
        to_mask = torch.zeros_like(self.mask) if self.wants_mask and self.mask is not None else None
        own = travelling = torch.zeros(0)
        arrive = None
        for step, its_key, its_value in ring.rounds(key, value):
            owner = ring.owner(step)
            packed = self._add(owner, its_key, its_value, to_query, to_mask)
            if step == 0:
                own = packed
                continue
            travelling = packed.add_(arrive()) if arrive else packed
            arrive = ring.comm.shift(travelling, ring.axis, (ring.numel(ring.owner(step + 1)),))
        if arrive:
            own.add_(arrive())
        return Gradients(to_query, *ring.parts(own, ring.rank), to_mask)

    def _add(
        self, owner: int, key: Tensor, value: Tensor, to_query: Tensor, to_mask: Tensor | None
    ) -> Tensor:
        """The gradients of an owner's keys and values; those of queries and mask are added up."""
        ring, known = self.ring, self.known
        packed = wide(key.new_empty(0)).new_zeros(ring.numel(owner))
        to_key, to_value = ring.parts(packed, owner)
        for rows, columns, visible in ring.pieces(owner, self.mask):
            found = attend_backward(
                self.query[..., rows, :], key[..., columns, :], value[..., columns, :], visible,
                AttentionStats(*(x[..., rows, :] for x in (known.out, known.total, known.grad))),
                self.wants_mask,
            )  # fmt: skip
            # `x[...] += y` would copy the sum onto itself, too.
            to_query[..., rows, :].add_(found.query)
            to_key[..., columns, :].add_(found.key)
            to_value[..., columns, :].add_(found.value)
            if to_mask is not None and found.mask is not None:
                places = ring.columns(to_mask, owner)
                widths = [place.shape[-1] for place in places]
                for place, part in zip(
                    places, torch.split_with_sizes(found.mask, widths, -1), strict=True
                ):
                    place += part
        return packed


def _nothing(query: Tensor, value: Tensor) -> PartialAttention:
    """What queries that see no keys find. Heads of a token lie side by side, as torch's kernels
    leave them: who puts them together again needs no copy, which the backward would keep."""
    like = wide(query.new_empty(0))
    *lead, rows, _ = query.shape
    heads = min(2, len(lead))
    by_token = like.new_zeros(*lead[:-heads], rows, *lead[-heads:], value.shape[-1])
    out = by_token.movedim(-2 - heads, -2)
    return PartialAttention(out, like.new_full((*lead, rows, 1), -torch.inf))


def ring_attention(
    comm: Comm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: str,
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    sections: tuple[int, int] = (1, 1),
    zigzag: bool = False,
) -> Tensor:
    """Attention of [..., h, l, e] to [..., g, s, e], both split along the sequence over the axis.

    `queries` and `keys` are each rank's share of every section that the two sequences are cut into.
    With several sections a rank has early and late queries, which evens out causal work; with two
    in zigzag all ranks have equally much in every round. A mask holds the rank's queries, or one
    for all, and all of the keys.
    """
    if dropout_p and comm.training:
        raise PlanError(f"attention split along keys has no dropout; {dropout_p} is given, not 0")
    query, key, value = (as_autocast(x) for x in (query, key, value))
    groups = key.shape[-3] if key.ndim > 2 else 1
    heads = query.shape[-3] // groups if query.ndim > 2 else 1
    scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
    ring = Ring(
        comm, axis, Share(queries, sections[0], zigzag), Share(keys, sections[1], zigzag), scale,
        is_causal,
        tuple(key.shape[:-2]), (key.shape[-1], value.shape[-1]),
    )  # fmt: skip
    queries_by_group = grouped(query, groups, heads)
    mask = None if attn_mask is None else grouped_mask(attn_mask, query.ndim, groups, heads)
    apply: Callable[..., Tensor] = _Attention.apply
    return apply(queries_by_group, key, value, mask, ring).view(*query.shape[:-1], value.shape[-1])
