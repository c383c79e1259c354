"""Attention over a window whose sequence is split: each rank fetches the keys before its runs.

Which those are follows from where runs lie, so they may come from several ranks, and in a zigzag
from both sides. In backward the gradients of what was fetched go home.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.attention.attend import as_autocast
from meshwright.codegen.attention.ring_ownership import Share
from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.graph.windowed import windowed
from meshwright.ir.graph.windows import Span, common


@dataclass(frozen=True)
class _Border:
    """What the ranks of an axis hold of a sequence, and what they need before it."""

    comm: Comm
    axis: str
    share: Share
    window: int

    @property
    def rank(self) -> int:
        return self.comm.coordinates[self.axis]

    @property
    def ranks(self) -> range:
        return range(len(self.share.sizes))

    def held(self, rank: int) -> list[Span]:
        size = self.share.sizes[rank]
        return [(start, start + size) for start in self.share.starts(rank)]

    def needed(self, rank: int) -> list[Span]:
        """Before each run of a rank."""
        return [(max(0, start - self.window + 1), start) for start, _ in self.held(rank)]

    def pieces(self, giver: int, taker: int) -> list[list[Span]]:
        """What one has of what the other needs, for each run of the taker, ascending."""
        return [
            [found for held in self.held(giver) if (found := common(held, need))[0] < found[1]]
            for need in self.needed(taker)
        ]

    def count(self, giver: int, taker: int) -> int:
        return sum(b - a for spans in self.pieces(giver, taker) for a, b in spans)

    def local(self, span: Span) -> slice:
        """Where a span of a run of this rank lies here."""
        before = 0
        for start, stop in self.held(self.rank):
            if start <= span[0] and span[1] <= stop:
                return slice(before + span[0] - start, before + span[1] - start)
            before += stop - start
        raise AssertionError(span)

    def taken(self, x: Tensor, taker: int) -> Tensor:
        """The rows of x [..., s, n] that another rank needs, run after run."""
        spans = [span for run in self.pieces(self.rank, taker) for span in run]
        return torch.cat([x[..., self.local(s), :] for s in spans] or [x[..., :0, :]], -2)

    def trade(self, parts: list[Tensor], counts: list[int], like: Tensor) -> list[Tensor]:
        """Parts go to the others; of each comes a number of rows like those of a tensor."""
        shapes = [(*like.shape[:-2], n, like.shape[-1]) for n in counts]
        own, nothing = self.rank, like[..., :0, :].contiguous()
        sent = [nothing if r == own else part.contiguous() for r, part in enumerate(parts)]
        shapes[own] = tuple(nothing.shape)
        received = self.comm.trade(sent, self.axis, shapes, neighbours=True)
        received[own] = parts[own]
        return received


class _FetchKeys(torch.autograd.Function):
    """The rows [..., n, e] that this rank needs before its runs, run after run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, border: _Border) -> Tensor:
        ctx.border, ctx.shape = border, x.shape
        me = border.rank
        parts = [border.taken(x, taker) for taker in border.ranks]
        counts = [border.count(giver, me) for giver in border.ranks]
        return _in_order(border, border.trade(parts, counts, x), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        border, grad, me = ctx.border, grads[0], ctx.border.rank
        home: list[list[Tensor]] = [[grad[..., :0, :]] for _ in border.ranks]
        for giver, rows in _origins(border):
            home[giver].append(grad[..., rows, :])
        counts = [border.count(me, taker) for taker in border.ranks]
        received = border.trade([torch.cat(parts, -2) for parts in home], counts, grad)
        made = grad.new_zeros(ctx.shape)
        for taker, part in enumerate(received):
            at = 0
            for span in (s for run in border.pieces(me, taker) for s in run):
                length = span[1] - span[0]
                made[..., border.local(span), :].add_(part[..., at : at + length, :])
                at += length
        return made, None


def _origins(border: _Border) -> list[tuple[int, slice]]:
    """Of the fetched rows in their order: which rank each stretch is from, and where it is."""
    found, at = list[tuple[int, slice]](), 0
    runs = [border.pieces(giver, border.rank) for giver in border.ranks]
    for run in range(border.share.sections):
        spans = sorted((span, giver) for giver in border.ranks for span in runs[giver][run])
        for (start, stop), giver in spans:
            found.append((giver, slice(at, at + stop - start)))
            at += stop - start
    return found


def _in_order(border: _Border, received: list[Tensor], like: Tensor) -> Tensor:
    """Rows that came from each rank, run after run, as they follow each other in the sequence."""
    used, rows = [0] * len(received), [like[..., :0, :]]
    for giver, place in _origins(border):
        length = place.stop - place.start
        rows.append(received[giver][..., used[giver] : used[giver] + length, :])
        used[giver] += length
    return torch.cat(rows, -2)


def windowed_attention(
    comm: Comm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    axis: str,
    sizes: tuple[int, ...],
    sinks: Tensor | None = None,
    scale: float | None = None,
    sections: int = 1,
    zigzag: bool = False,
) -> Tensor:
    """Attention of [..., h, l, e] to the last `window` of [..., g, s, e], all split over the axis.

    `sizes` are each rank's share of every section of the sequence.
    """
    query, key, value = (as_autocast(x) for x in (query, key, value))
    border = _Border(comm, axis, Share(sizes, sections, zigzag), window)
    both = torch.cat([key, value], -1)
    apply: Callable[..., Tensor] = _FetchKeys.apply
    before = apply(both, border) if window > 1 else both[..., :0, :]
    made, at, size = list[Tensor](), 0, sizes[border.rank]
    for run, (start, stop) in enumerate(border.needed(border.rank)):
        here = slice(run * size, (run + 1) * size)
        keys = torch.cat([before[..., at : at + stop - start, :], both[..., here, :]], -2)
        at += stop - start
        k, v = torch.split_with_sizes(keys, (key.shape[-1], value.shape[-1]), -1)
        made.append(windowed(query[..., here, :], k, v, window, sinks, scale, stop - start))
    return torch.cat(made, -2)
