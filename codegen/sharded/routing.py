"""Experts on the ranks of an axis that also splits the tokens: tokens go where their experts are.

A token is sent once to each rank that has some of its experts, whatever their number; that rank
adds up its experts' results, weighted, and sends the sum back. Over several axes that is done one
inside the other. How many tokens go where depends on
the data, so the ranks tell each other first.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.collectives.line import TradedRows
from meshwright.codegen.sharded.later import taking
from meshwright.ir.graph.expert_form import of_arrived, parse_form
from meshwright.ir.graph.experts import Operands, dtype_of_products
from meshwright.ir.graph.windows import spans
from meshwright.ir.kernels.route import (
    home_reference,
    out_reference,
    places_of,
    route_home,
    route_out,
)
from meshwright.ir.torch_private import backward_reaches, run_backward

_Rows = Callable[[Tensor, Tensor, Tensor], Tensor]


class Route(NamedTuple):
    """Which tokens of this rank go to which ranks of an axis: a row for each such pair."""

    picked: Tensor
    """[rows, K] the token's experts as the rank that gets the row counts them: what lies outside of
    its own adds nothing there."""
    tokens: Tensor
    """[rows] of which token each is."""
    places: Tensor
    """[ranks, T] where among the rows the one of a token for a rank is; -1: there is none."""
    out: TradedRows
    home: TradedRows


def find_route(comm: Comm, top_k_index: Tensor, *, axis: str, experts: tuple[int, ...]) -> Route:
    """Finds out where tokens go, of an index [T, K], where the ranks of the axis have so many
    `experts` each; the ranks tell each other how many rows come."""
    held = spans(experts)
    owned = _owned(top_k_index, held)
    ranks = owned.nonzero()[:, 0]
    tokens, places = places_of(owned)
    first = top_k_index.new_tensor([start for start, _ in held])
    picked = top_k_index[tokens] - first[ranks].unsqueeze(1)
    out = _told(comm, axis, owned.sum(1))
    return Route(picked, tokens, places, out, out.back())


def _owned(index: Tensor, held: Sequence[tuple[int, int]]) -> Tensor:
    """Rank by rank, whether it has some of a token's experts [ranks, T]; ranks have one run of them
    after the other. As many small operators for few ranks as for many."""
    ends = index.new_tensor([end for _, end in held])
    rank = torch.bucketize(index, ends, right=True).masked_fill_(index < 0, len(held))
    found = torch.zeros(len(index), len(held) + 1, dtype=torch.bool, device=index.device)
    return found.scatter_(1, rank, True)[:, : len(held)].T


def _told(comm: Comm, axis: str, counts: Tensor) -> TradedRows:
    ranks = comm.line(axis).size
    told = comm.trade(
        list(torch.split_with_sizes(counts, [1] * ranks)), axis, [(1,)] * ranks, neighbours=False
    )
    sent, received = torch.stack([counts, torch.cat(told)]).tolist()
    return TradedRows(tuple(sent), tuple(received))


def rows_out(comm: Comm, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Rows of x [T, ...] in order of the rank that they go to."""
    go = route_out if "route" in comm.kernels else out_reference
    return go(x, tokens, places)


def rows_home(comm: Comm, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Per token the sum [T, ...] of what has come home of it."""
    home = route_home if "route" in comm.kernels else home_reference
    return home(rows, tokens, places)


def is_narrow(form: object) -> bool:
    """Tell whether tokens of a form of experts travel in 8-bit floats, and gradients of results."""
    return parse_form(str(form or "")).narrow_tokens


def experts_here(
    comm: Comm, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    **given: Tensor | str | None,
) -> Tensor:  # fmt: skip
    """`meshwright.experts` of the rows that have come to this rank. Its backward may leave the
    gradients of weights to be made while those of tokens are on their way."""
    named = {name: None for name in Operands._fields} | given
    named["form"] = of_arrived(named["form"])
    given_all = (hidden, top_k_index, top_k_weights, *list(named.values())[3:])
    apply: Callable[..., Tensor] = _ExpertsHere.apply
    return apply(*given_all)


class _ExpertsHere(torch.autograd.Function):
    """As `meshwright.experts`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        products = dtype_of_products(inputs[0])
        output, product = torch.ops.meshwright.experts_forward(*inputs, products=products)
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.save_for_backward(product, *(inputs[i] for i in ctx.places))
        made: Tensor = output
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        product, *tensors = ctx.saved_tensors
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.places, tensors, strict=True):
            inputs[place] = tensor
        grad = gradients[0]
        to_hidden, to_scale, *pieces = torch.ops.meshwright.experts_backward_tokens(
            grad, product, *inputs
        )
        found: list[Tensor | None] = [None] * len(inputs)
        found[0], found[2] = to_hidden, to_scale
        weights = [place for place in ctx.places if place > 2]
        nodes = dict(zip(ctx.places, [node for node, _ in ctx.next_functions], strict=True))
        # The first half of a backward that is split wants gradients of tokens alone.
        if not backward_reaches([nodes[place] for place in weights if nodes[place] is not None]):
            return tuple(found)

        def made() -> list[Tensor]:
            several: list[Tensor] = torch.ops.meshwright.experts_backward_weights(
                grad, *pieces, *inputs
            )
            return several

        later = taking()
        if later is None:
            for place, one in zip(weights, made(), strict=True):
                found[place] = one
            return tuple(found)
        # A node may be asked once: what it leaves goes into the graphs of its weights by itself.
        edges = [get_gradient_edge(inputs[place]) for place in weights
                 if inputs[place].requires_grad]  # fmt: skip
        trained = [inputs[place].requires_grad for place in weights]

        def work() -> None:
            with torch.no_grad():
                grads = [g for g, wanted in zip(made(), trained, strict=True) if wanted]
            run_backward(edges, grads)

        later.add(work)
        return tuple(found)


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
    on there, so that each crosses the outer axis once for all of them.

    Where something is to go on beside that, `codegen.passes.travelling` makes the same of a block
    step by step."""
    narrow = is_narrow(given.get("form"))
    picked, tokens, places, out, home = find_route(comm, top_k_index, axis=axis, experts=experts)
    index = comm.travel(picked, axis, out)
    go = rows_out(comm, hidden, tokens, places)
    here = comm.travel(go, axis, out, narrow="rows" if narrow else "")
    weights = comm.travel(rows_out(comm, top_k_weights, tokens, places), axis, out)
    if inside:
        (then, shares), *more = inside
        made = routed_experts(
            comm, here, index, weights, axis=then, experts=shares, inside=tuple(more), **given
        )
    else:
        made = experts_here(comm, here, index, weights, **given)
    come = comm.travel(made, axis, home, narrow="gradients" if narrow else "")
    return rows_home(comm, come, tokens, places)
