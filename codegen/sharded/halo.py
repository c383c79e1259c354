"""Windows over a dim that is split: each rank fetches the elements around its part that it needs.

What a rank needs follows from what it makes, so parts of any size work, also where they are thinner
than the window and several ranks away. In backward the gradients of what was fetched go home.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.graph.images import channels_last, is_channels_last
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.windows import Span, common, spans


@dataclass(frozen=True)
class _Halo:
    """What the ranks of an axis hold of a dim, and what they need."""

    comm: Comm
    axis: str
    dim: int
    held: tuple[Span, ...]
    needed: tuple[Span, ...]

    @property
    def rank(self) -> int:
        return self.comm.coordinates[self.axis]

    def given(self) -> list[Span]:
        """What this rank hands to each other, of what it holds; nothing to itself."""
        mine = self.held[self.rank]
        return [self._to_another(mine, needed, i) for i, needed in enumerate(self.needed)]

    def taken(self) -> list[Span]:
        """What this rank gets from each other."""
        mine = self.needed[self.rank]
        return [self._to_another(held, mine, i) for i, held in enumerate(self.held)]

    def _to_another(self, held: Span, needed: Span, rank: int) -> Span:
        return (held[0], held[0]) if rank == self.rank else common(held, needed)

    def trade(self, x: Tensor, parts: Sequence[Tensor], received: Sequence[Span]) -> list[Tensor]:
        """Parts of x go to the others; what comes is as long as its span."""
        shapes = []
        for start, stop in received:
            shape = list(x.shape)
            shape[self.dim] = stop - start
            shapes.append(tuple(shape))
        return self.comm.trade(list(parts), self.axis, shapes, neighbours=True)

    def cut(self, x: Tensor, span: Span, start: int) -> Tensor:
        """A span of x, which begins at `start`; an empty one may lie anywhere."""
        length = span[1] - span[0]
        return x.narrow(self.dim, span[0] - start if length else 0, length)


class _Fetch(torch.autograd.Function):
    """The elements that lie in what this rank needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo) -> Tensor:
        ctx.halo, ctx.shape = halo, x.shape
        mine, needed = halo.held[halo.rank], halo.needed[halo.rank]
        parts = [halo.cut(x, span, mine[0]).contiguous() for span in halo.given()]
        received = halo.trade(x, parts, halo.taken())
        received[halo.rank] = halo.cut(x, common(mine, needed), mine[0])
        return torch.cat(received, halo.dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        halo, grad = ctx.halo, grads[0]
        mine, needed = halo.held[halo.rank], halo.needed[halo.rank]
        own, taken = common(mine, needed), halo.taken()
        lengths = [stop - start for start, stop in taken]
        lengths[halo.rank] = own[1] - own[0]
        parts = list(torch.split_with_sizes(grad, lengths, halo.dim))
        kept = parts[halo.rank]
        parts[halo.rank] = kept.narrow(halo.dim, 0, 0)
        result = grad.new_zeros(ctx.shape)
        halo.cut(result, own, mine[0]).copy_(kept)
        given = halo.given()
        received = halo.trade(grad, [part.contiguous() for part in parts], given)
        for span, part in zip(given, received, strict=True):
            halo.cut(result, span, mine[0]).add_(part)
        return result, None


def fetched(
    comm: Comm,
    x: Tensor,
    axis: str,
    dim: int,
    sizes: tuple[int, ...],
    needed: tuple[Span, ...],
    fill: float,
) -> Tensor:
    """What this rank needs of a dim of which the ranks hold `sizes`; `fill` beyond its ends.

    Nothing is sent if all ranks have what they need.
    """
    end, held = sum(sizes), spans(sizes)
    inside = tuple(common((0, end), span) for span in needed)
    start, stop = needed[comm.coordinates[axis]]
    halo = _Halo(comm, axis, dim, held, inside)
    if all(common(mine, span) == span for mine, span in zip(held, inside, strict=True)):
        found = halo.cut(x, inside[halo.rank], held[halo.rank][0])
    else:
        apply: Callable[..., Tensor] = _Fetch.apply
        found = apply(x, halo)
    before, after = max(0, -start), max(0, stop - end)
    if not before and not after:
        return found
    return pad(found, [0, 0] * (x.ndim - dim - 1) + [before, after], value=fill)


def windowed(
    comm: Comm,
    target: str,
    name: str,
    halos: tuple[tuple[str, int, tuple[int, ...], tuple[Span, ...]], ...],
    fill: float,
    **arguments: Any,
) -> object:
    """A convolution or pooling of this rank's part of some dims: axis, dim, each rank's elements
    and what its outputs read. `name` is the argument that is split; its padding there is done."""
    x = arguments.pop(name)
    last = is_channels_last(x)
    for axis, dim, sizes, needed in halos:
        x = fetched(comm, x, axis, dim, sizes, needed, fill)
    return operator(target)(channels_last(x) if last else x, **arguments)
