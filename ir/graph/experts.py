"""Mixture-of-experts layer as one operator, `meshwright.experts`.

Tokens are sorted by expert, so each expert is two matrix products over its run of tokens. Backward
keeps the first product and takes the activation again. An index outside [0, experts) belongs to an
expert that is not here and adds nothing, so a rank can hold some of the experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.ir.graph.own_operators import LIBRARY

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
Tensors = tuple[torch.Tensor, ...]
_ARGUMENTS = (
    "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down, str act"
)
# Not by autograd: inside an operator that someone watches (a dispatch mode) there is none.
_DERIVATIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": torch.ops.aten.silu_backward.default,
    "swish": torch.ops.aten.silu_backward.default,
    "gelu": torch.ops.aten.gelu_backward.default,
    "gelu_pytorch_tanh": partial(torch.ops.aten.gelu_backward.default, approximate="tanh"),
    "relu": lambda grad, x: torch.ops.aten.threshold_backward.default(grad, x, 0),
}
"""(gradient of the activation's result, its operand) -> gradient of the operand."""
LIBRARY.define(f"experts({_ARGUMENTS}) -> Tensor")
LIBRARY.define(f"experts_forward({_ARGUMENTS}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"experts_backward(Tensor grad, Tensor product, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def _gated(product: torch.Tensor, act: str) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return ACTIVATIONS[act](gate) * up


def _ungated(product: torch.Tensor, grad: torch.Tensor, act: str) -> torch.Tensor:
    """The gradient of `product`, from that of what `_gated` makes of it."""
    gate, up = product.chunk(2, dim=-1)
    back = _DERIVATIVES[act](grad * up, gate)
    return torch.cat([back, grad * ACTIVATIONS[act](gate)], -1)


def _runs(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(token, expert) pairs by expert: their token, their flat position, pairs per expert."""
    flat = index.reshape(-1)
    here = (flat >= 0) & (flat < experts)
    key = torch.where(here, flat, experts)
    order = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=experts + 1)[:experts].tolist()
    order = order[: sum(counts)]
    return order // index.shape[-1], order, counts


def experts_forward(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [T, H], index and weights [T, K], gate_up [E, 2I, H], down [E, H, I] -> [T, H].

    Also the first product [pairs, 2I] of the (token, expert) pairs that are here, by expert; where
    all experts are, there are T*K pairs.
    """
    tokens, pairs, counts = _runs(top_k_index, gate_up.shape[0])
    product = hidden.new_empty(len(pairs), gate_up.shape[1])
    output = hidden.new_zeros(hidden.shape)
    scale = top_k_weights.reshape(-1)[pairs].unsqueeze(-1).to(hidden.dtype)
    start = 0
    for expert, count in enumerate(counts):
        run = slice(start, start + count)
        product[run] = hidden[tokens[run]] @ gate_up[expert].T
        result = _gated(product[run], act) @ down[expert].T
        output.index_add_(0, tokens[run], result * scale[run])
        start += count
    return output, product


def experts_backward(
    grad: torch.Tensor,
    product: torch.Tensor,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: str,
) -> Tensors:
    """Gradients of hidden, top_k_weights, gate_up and down."""
    tokens, pairs, counts = _runs(top_k_index, gate_up.shape[0])
    grad_hidden, grad_scale = torch.zeros_like(hidden), torch.zeros_like(top_k_weights)
    grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
    scale = top_k_weights.reshape(-1)[pairs].unsqueeze(-1).to(hidden.dtype)
    start = 0
    for expert, count in enumerate(counts):
        run = slice(start, start + count)
        start += count
        gated = _gated(product[run], act)
        incoming = grad[tokens[run]]
        back = incoming @ down[expert]
        grad_scale.view(-1)[pairs[run]] = (back * gated).sum(-1).to(grad_scale.dtype)
        grad_first = _ungated(product[run], back * scale[run], act)
        grad_down[expert] = (incoming * scale[run]).T @ gated
        grad_gate_up[expert] = grad_first.T @ hidden[tokens[run]]
        grad_hidden.index_add_(0, tokens[run], grad_first @ gate_up[expert])
    return grad_hidden, grad_scale, grad_gate_up, grad_down


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        output, product = torch.ops.meshwright.experts_forward(*inputs)
        *tensors, ctx.act = inputs
        ctx.save_for_backward(product, *tensors)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        product, *tensors = ctx.saved_tensors
        hidden, scale, gate_up, down = torch.ops.meshwright.experts_backward(
            grad, product, *tensors, ctx.act
        )
        return hidden, None, scale, gate_up, down, None


def _first(*inputs: Any) -> torch.Tensor:
    return experts_forward(*inputs)[0]


def _forward_shapes(
    hidden: torch.Tensor, index: torch.Tensor, _: Any, gate_up: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(index.numel(), gate_up.shape[1])


LIBRARY.impl("experts", _Experts.apply, "Autograd")
LIBRARY.impl("experts", _first, "CompositeExplicitAutograd")
LIBRARY.impl("experts", lambda hidden, *_: torch.empty_like(hidden), "Meta")
LIBRARY.impl("experts_forward", experts_forward, "CompositeExplicitAutograd")
LIBRARY.impl("experts_forward", _forward_shapes, "Meta")
LIBRARY.impl("experts_backward", experts_backward, "CompositeExplicitAutograd")
LIBRARY.impl(
    "experts_backward",
    lambda grad, product, hidden, index, scale, gate_up, down, act: tuple(
        torch.empty_like(t) for t in (hidden, scale, gate_up, down)
    ),
    "Meta",
)

EXPERTS = torch.ops.meshwright.experts.default
