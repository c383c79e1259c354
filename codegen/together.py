"""Collectives and the products or norms beside them as one call, whose parts a kernel overlaps.

Each has two ways: kernels that read and write the peers' memory while they compute, where
`codegen.symmetric` has such memory; otherwise the plain collective and torch's operators. What the
backward keeps and sends is the same as of separate calls.
"""

# mypy: disallow-untyped-defs=False

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from meshwright.codegen import peer_calls
from meshwright.codegen.comm import Comm
from meshwright.codegen.kernels.launch import TAKEN
from meshwright.codegen.kernels.layer_norm import add_layer_norm, layer_norm_backward
from meshwright.codegen.kernels.rms_norm import add_rms_norm, rms_norm_backward
from meshwright.codegen.primitives import Part
from meshwright.ir.conversions import Primitive


class _ReduceNorm(torch.autograd.Function):
    """The sum of the ranks' summands, a residual added to it, and its norm."""

    @staticmethod
    def forward(ctx, comm, axis, summand, residual, gain, bias, eps):
        made = peer_calls.reduce_norm(comm, axis, summand, residual, gain, bias, eps)
        TAKEN["reduce_norm", "torch" if made is None else "triton"] += 1
        if made is None:
            summed = comm.run(Primitive.ALL_REDUCE, summand, axis, None, None, True)
            made = _norm(summed, residual, gain, bias, eps)
        total, out, *rows = made
        ctx.save_for_backward(total, gain, *rows)
        ctx.centred = bias is not None
        ctx.dtypes = summand.dtype, residual.dtype
        ctx.mark_non_differentiable(*rows)
        return total, out, *rows

    @staticmethod
    def backward(ctx, grad_total, grad_out, *_):
        total, gain, *rows = ctx.saved_tensors
        if ctx.centred:
            back, *others = layer_norm_backward(grad_total, grad_out, total, gain, *rows)
        else:
            back, to_gain = rms_norm_backward(grad_total, grad_out, total, gain, *rows)
            others = [to_gain, None]
        to_summand, to_residual = (back.to(dtype) for dtype in ctx.dtypes)
        return None, None, to_summand, to_residual, *others, None


def _norm(
    summed: Tensor, residual: Tensor, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = (
        add_rms_norm(summed, residual, gain, eps)
        if bias is None
        else add_layer_norm(summed, residual, gain, bias, eps)
    )
    return found


def reduce_norm(
    comm: Comm, summand: Tensor, residual: Tensor, gain: Tensor, bias: Tensor | None, eps: float,
    axis: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(sum over the axis + residual, its norm, and what `add_rms_norm`, or with a bias
    `add_layer_norm`, makes besides)."""
    apply: Callable[..., tuple[Tensor, ...]] = _ReduceNorm.apply
    return apply(comm, axis, summand, residual, gain, bias, eps)


class _GatherLinear(torch.autograd.Function):
    """Products of x as if whole on the axis; its gradient is summed and scattered."""

    @staticmethod
    def forward(ctx, comm, axis, part, count, x, *operands):
        dtype = _computed_in(x)
        given, biases = operands[:count], operands[count:]
        ctx.given = [x.dtype, *(None if o is None else o.dtype for o in operands)]
        x, weights = x.to(dtype), [w.to(dtype) for w in given]
        added = [_cast(bias, dtype) for bias in biases]
        found = peer_calls.gather_linear(comm, axis, part, x, weights, added)
        TAKEN["gather_linear", "torch" if found is None else "triton"] += 1
        if found is None:
            whole = comm.run(Primitive.ALL_GATHER, x, axis, part, None, True)
            found = whole, list(map(linear, [whole] * count, weights, added))
        whole, made = found
        ctx.comm, ctx.axis, ctx.part = comm, axis, part
        ctx.save_for_backward(whole, *weights)
        return tuple(made)

    @staticmethod
    def backward(ctx, *grads):
        whole, *weights = ctx.saved_tensors
        back = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
        to_x = ctx.comm.run(Primitive.REDUCE_SCATTER, back, ctx.axis, None, ctx.part, True)
        to_weights = [_outer(grad, whole) for grad in grads]
        to_biases = [
            None if dtype is None else _rows(grad).sum(0)
            for grad, dtype in zip(grads, ctx.given[1 + len(grads) :], strict=True)
        ]
        found = [_cast(x, d) for x, d in
                 zip((to_x, *to_weights, *to_biases), ctx.given, strict=True)]  # fmt: skip
        return None, None, None, None, *found


def gather_linear(
    comm: Comm, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], axis: str,
    dim: int, sizes: tuple[int, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of each weight: x, of which each rank has so many `sizes` of a dim, all of it, times it."""
    apply: Callable[..., tuple[Tensor, ...]] = _GatherLinear.apply
    return apply(comm, axis, Part(dim, sizes), len(weights), x, *weights, *biases)


class _LinearScatter(torch.autograd.Function):
    """This rank's part of the sum of all ranks' products; the gradient is gathered."""

    @staticmethod
    def forward(ctx, comm, axis, part, x, weight, bias):
        dtype = _computed_in(x)
        ctx.given = [x.dtype, weight.dtype, None if bias is None else bias.dtype]
        x, weight = x.to(dtype), weight.to(dtype)
        bias = _cast(bias, dtype)
        ctx.comm, ctx.axis, ctx.part = comm, axis, part
        ctx.save_for_backward(x, weight)
        made = peer_calls.linear_scatter(comm, axis, part, x, weight, bias)
        TAKEN["linear_scatter", "torch" if made is None else "triton"] += 1
        if made is None:
            summands = linear(x, weight, bias)
            made = comm.run(Primitive.REDUCE_SCATTER, summands, axis, None, part, True)
        return made

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = ctx.comm.run(Primitive.ALL_GATHER, grad, ctx.axis, ctx.part, None, True)
        to_bias = None if ctx.given[2] is None else _rows(whole).sum(0)
        made = (whole @ weight, _outer(whole, x), to_bias)
        found = [_cast(x, d) for x, d in zip(made, ctx.given, strict=True)]
        return None, None, None, *found


def linear_scatter(
    comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None, axis: str, dim: int,
    sizes: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """The product's summands, summed; each rank gets so many `sizes` of a dim."""
    apply: Callable[..., Tensor] = _LinearScatter.apply
    return apply(comm, axis, Part(dim, sizes), x, weight, bias)


def _computed_in(x: Tensor) -> torch.dtype:
    """What autocast would have products computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _cast(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if x is None or dtype is None else x.to(dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight."""
    return _rows(grad).T @ _rows(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sharded.reduce_norm": reduce_norm,
    "sharded.gather_linear": gather_linear,
    "sharded.linear_scatter": linear_scatter,
}
