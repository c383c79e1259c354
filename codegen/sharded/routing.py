"""Experts on the ranks of an axis that also splits the tokens: tokens go where their experts are.

A token is sent once to each rank that has some of its experts, whatever their number; that rank
adds up its experts' results, weighted, and sends the sum back. Over several axes that is done one
inside the other. How many tokens go where depends on
the data, so the ranks tell each other first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.graph.windows import spans
from meshwright.ir.kernels.route import (
    home_reference,
    out_reference,
    places_of,
    route_home,
    route_out,
)

_Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
_references: tuple[_Rows, _Rows] = (out_reference, home_reference)
_kernels: tuple[_Rows, _Rows] = (route_out, route_home)


@dataclass(frozen=True)
class _Route:
    """How many rows this rank sends to each other, and gets from it."""

    comm: Comm
    axis: str
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def back(self) -> "_Route":
        return _Route(self.comm, self.axis, self.received, self.sent)

    def move(self, rows: Tensor) -> Tensor:
        """Rows in order of the rank they go to; they come in order of the rank they come from."""
        parts = list(torch.split_with_sizes(rows.contiguous(), self.sent))
        shapes = [(count, *rows.shape[1:]) for count in self.received]
        return torch.cat(self.comm.trade(parts, self.axis, shapes, neighbours=False))


class _Move(torch.autograd.Function):
    """Rows go out; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        return route.move(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.route.back().move(grads[0]), None


def _moved(rows: Tensor, route: _Route) -> Tensor:
    apply: Callable[..., Tensor] = _Move.apply
    return apply(rows, route)


def _owned(index: Tensor, held: Sequence[tuple[int, int]]) -> Tensor:
    """Rank by rank, whether it has some of a token's experts [ranks, T]; ranks have one run of them
    after the other. As many small operators for few ranks as for many."""
    ends = index.new_tensor([end for _, end in held])
    rank = torch.bucketize(index, ends, right=True).masked_fill_(index < 0, len(held))
    found = torch.zeros(len(index), len(held) + 1, dtype=torch.bool, device=index.device)
    return found.scatter_(1, rank, True)[:, : len(held)].T


def _route(comm: Comm, axis: str, counts: Tensor) -> _Route:
    """The ranks tell each other how many rows come."""
    ranks = comm.line(axis).size
    told = comm.trade(
        list(torch.split_with_sizes(counts, [1] * ranks)), axis, [(1,)] * ranks, neighbours=False
    )
    sent, received = torch.stack([counts, torch.cat(told)]).tolist()
    return _Route(comm, axis, tuple(sent), tuple(received))


def routed_experts(
    comm: Comm,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    axis: str,
    experts: tuple[int, ...],
    inside: tuple[tuple[str, tuple[int, ...]], ...] = (),
    **given: Tensor | str | None,
) -> Tensor:
    """`meshwright.experts` of this rank's tokens, where the ranks have so many `experts` each;
    `given`: the weights, and what else that operator takes. `inside`: further axes, on which ranks
    share out the experts that this one's coordinate on `axis` has: tokens that have come are sent
    on there, so that each crosses the outer axis once for all of them."""
    held = spans(experts)
    owned = _owned(top_k_index, held)
    ranks = owned.nonzero()[:, 0]
    tokens, places = places_of(owned)
    go, home = _kernels if "route" in comm.kernels else _references
    route = _route(comm, axis, owned.sum(1))
    first = top_k_index.new_tensor([start for start, _ in held])
    # As the rank that gets them counts: what lies outside its experts adds nothing there.
    index = route.move(top_k_index[tokens] - first[ranks].unsqueeze(1))
    here = _moved(go(hidden, tokens, places), route)
    weights = _moved(go(top_k_weights, tokens, places), route)
    if inside:
        (then, shares), *more = inside
        made = routed_experts(
            comm, here, index, weights, axis=then, experts=shares, inside=tuple(more), **given
        )
    else:
        made = torch.ops.meshwright.experts(here, index, weights, **given)
    return home(_moved(made, route.back()).to(hidden.dtype), tokens, places)
