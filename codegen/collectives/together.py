"""Collectives and the products or norms beside them as one operator, whose parts a kernel overlaps.

Each has two ways: kernels that read and write the peers' memory while they compute, where
`codegen.collectives.symmetric` has such memory; otherwise the plain collective and torch's
operators. The gradient of gathering for a product is a product that scatters, and the other way
round, so each is the backward of the other, by the same kernels. Torch traces, compiles and
differentiates them: a mesh is a number to them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import linear

from meshwright.codegen.collectives import peer_calls
from meshwright.codegen.collectives.comm import Comm, comm_of
from meshwright.codegen.collectives.primitives import DimShares
from meshwright.ir.kernels.layer_norm import add_layer_norm, layer_norm_backward
from meshwright.ir.kernels.rms_norm import add_rms_norm, rms_norm_backward
from meshwright.ir.launch import TAKEN, held_dtype
from meshwright.ir.layout.conversions import Primitive


@custom_op("meshwright::reduce_norm", mutates_args=())
def _reduce_norm(
    summand: Tensor, residual: Tensor, gain: Tensor, bias: Tensor | None, eps: float, comm: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of the ranks' summands with a residual, its norm, and per row the mean, which RMSNorm
    has none of, and the scale."""
    mesh = comm_of(comm)
    made = peer_calls.reduce_norm(mesh, axis, summand, residual, gain, bias, eps)
    TAKEN["reduce_norm", made if isinstance(made, str) else ""] += 1
    if isinstance(made, str):
        summed = mesh.run(Primitive.ALL_REDUCE, summand, axis, None, None, True)
        made = _norm(summed, residual, gain, bias, eps)
    total, out, *rows = made
    mean = rows[0] if len(rows) > 1 else total.new_empty(0)
    return total, out, mean, rows[-1]


def _norm(
    summed: Tensor, residual: Tensor, gain: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = (
        add_rms_norm(summed, residual, gain, eps)
        if bias is None
        else add_layer_norm(summed, residual, gain, bias, eps)
    )
    return found


@_reduce_norm.register_fake
def _norm_shapes(summand, residual, gain, bias, eps, comm, axis):
    dtype = torch.promote_types(summand.dtype, residual.dtype)
    total = residual.new_empty(residual.shape, dtype=dtype)
    out = total.new_empty(total.shape, dtype=torch.promote_types(dtype, gain.dtype))
    rows = total.new_empty(total.shape[:-1], dtype=held_dtype(dtype))
    return total, out, total.new_empty(0) if bias is None else torch.empty_like(rows), rows


def _save_norm(ctx, inputs, output) -> None:
    summand, residual, gain, bias, *_ = inputs
    total, _, mean, inverse = output
    ctx.save_for_backward(total, gain, mean, inverse)
    ctx.centred, ctx.dtypes = bias is not None, (summand.dtype, residual.dtype)
    ctx.mark_non_differentiable(mean, inverse)


def _differentiate_norm(ctx, grad_total, grad_out, *_):
    total, gain, mean, inverse = ctx.saved_tensors
    if ctx.centred:
        back, *others = layer_norm_backward(grad_total, grad_out, total, gain, mean, inverse)
    else:
        back, to_gain = rms_norm_backward(grad_total, grad_out, total, gain, inverse)
        others = [to_gain, None]
    return *(back.to(dtype) for dtype in ctx.dtypes), *others, None, None, None


_reduce_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)


def reduce_norm(
    comm: Comm, summand: Tensor, residual: Tensor, gain: Tensor, bias: Tensor | None, eps: float,
    axis: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(sum over the axis + residual, its norm, and what `add_rms_norm`, or with a bias
    `add_layer_norm`, makes besides)."""
    total, out, mean, inverse = _reduce_norm(summand, residual, gain, bias, eps, comm.number, axis)
    return (total, out, inverse) if bias is None else (total, out, mean, inverse)


@custom_op("meshwright::gather_linear", mutates_args=())
def _gather_linear(
    x: Tensor, weights: Sequence[Tensor], given: Sequence[Tensor], biased: Sequence[bool],
    comm: int, axis: str, dim: int, sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """x as if whole on the axis, and its products, some of which have one of the biases `given`."""
    mesh, part = comm_of(comm), DimShares(dim, tuple(sizes))
    left = iter(given)
    biases = [next(left) if one else None for one in biased]
    found = peer_calls.gather_linear(mesh, axis, part, x, weights, biases)
    TAKEN["gather_linear", found if isinstance(found, str) else ""] += 1
    if isinstance(found, str):
        whole = mesh.run(Primitive.ALL_GATHER, x, axis, part, None, True)
        if whole.data_ptr() == x.data_ptr():
            whole = whole.clone()
        found = whole, list(map(linear, [whole] * len(weights), weights, biases))
    whole, made = found
    return [whole, *made]


@_gather_linear.register_fake
def _gathered_shapes(x, weights, given, biased, comm, axis, dim, sizes):
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    made = [x.new_empty(*shape[:-1], len(weight)) for weight in weights]
    return [x.new_empty(shape), *made]


def _save_gathered(ctx, inputs, output) -> None:
    _, weights, _, ctx.biased, *ctx.where = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[0], *weights)


@custom_op("meshwright::gather_linear_backward", mutates_args=())
def _gather_linear_backward(
    grads: Sequence[Tensor], whole: Tensor, weights: Sequence[Tensor], comm: int, axis: str,
    dim: int, sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """The gradient of x, whose summands are on their way while those of the weights are made; then
    the weights'. The products' gradients are multiplied as one."""
    joined, weight = (grads[0], weights[0]) if len(grads) == 1 else (
        torch.cat(list(grads), -1), torch.cat(list(weights)))  # fmt: skip
    arrive = _begin_linear_scatter(comm_of(comm), joined, weight.T, None, axis, dim, sizes)
    to_weights = [_outer(grad, whole) for grad in grads]
    return [arrive(), *to_weights]


@_gather_linear_backward.register_fake
def _gathered_gradients(grads, whole, weights, comm, axis, dim, sizes):
    to_x = _part_of(whole, whole.shape[-1], comm, axis, dim, sizes)
    return [to_x, *(weight.new_empty(weight.shape) for weight in weights)]


def _differentiate_gathered(ctx, grads):
    whole, *weights = ctx.saved_tensors
    _, *found = grads
    back = [
        whole.new_zeros(*whole.shape[:-1], len(weight)) if grad is None else grad
        for grad, weight in zip(found, weights, strict=True)
    ]
    to_x, *to_weights = _gather_linear_backward(back, whole, weights, *ctx.where)
    to_biases = [_rows(grad).sum(0) for grad, one in zip(back, ctx.biased, strict=True) if one]
    return to_x, to_weights, to_biases, None, None, None, None, None


_gather_linear.register_autograd(_differentiate_gathered, setup_context=_save_gathered)


def gather_linear(
    comm: Comm, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], axis: str,
    dim: int, sizes: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of each weight: x, of which each rank has so many `sizes` of a dim, all of it, times it."""
    dtype = _computed_in(x)
    used, biased = [w.to(dtype) for w in weights], [bias is not None for bias in biases]
    added = [bias.to(dtype) for bias in biases if bias is not None]
    given = x.to(dtype), used, added, biased
    _, *made = _gather_linear(*given, comm.number, axis, dim, sizes)
    return tuple(made)


@custom_op("meshwright::linear_scatter", mutates_args=())
def _linear_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, comm: int, axis: str, dim: int,
    sizes: Sequence[int],
) -> Tensor:  # fmt: skip
    """This rank's part of the sum of all ranks' products."""
    made: Tensor = _begin_linear_scatter(comm_of(comm), x, weight, bias, axis, dim, sizes)()
    return made


def _begin_linear_scatter(
    mesh: Comm, x: Tensor, weight: Tensor, bias: Tensor | None, axis: str, dim: int,
    sizes: Sequence[int],
) -> Callable[[], Tensor]:  # fmt: skip
    """Starts it; what comes back waits for the summands of the others."""
    part = DimShares(dim, tuple(sizes))
    begun = peer_calls.begin_linear_scatter(mesh, axis, part, x, weight, bias)
    TAKEN["linear_scatter", begun if isinstance(begun, str) else ""] += 1
    if not isinstance(begun, str):
        return begun
    move = mesh.move(Primitive.REDUCE_SCATTER, axis, dim, sizes)
    return mesh.begin_forward(move, linear(x, weight, bias))


@_linear_scatter.register_fake
def _scattered_shape(x, weight, bias, comm, axis, dim, sizes):
    return _part_of(x, len(weight), comm, axis, dim, sizes)


def _part_of(
    x: Tensor, columns: int, comm: int, axis: str, dim: int, sizes: Sequence[int]
) -> Tensor:
    """Room for this rank's part of a dim of a product of x."""
    shape = [*x.shape[:-1], columns]
    shape[dim] = sizes[comm_of(comm).line(axis).rank]
    return x.new_empty(shape)


def _save_scattered(ctx, inputs, output) -> None:
    x, weight, bias, *ctx.where = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _differentiate_scattered(ctx, grad):
    """The gradient is gathered while it is multiplied; then that of the weight."""
    x, weight = ctx.saved_tensors
    whole, to_x = _gather_linear(grad, [weight.T], [], [False], *ctx.where)
    to_bias = _rows(whole).sum(0) if ctx.biased else None
    return to_x, _outer(whole, x), to_bias, None, None, None, None


_linear_scatter.register_autograd(_differentiate_scattered, setup_context=_save_scattered)


def linear_scatter(
    comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None, axis: str, dim: int,
    sizes: Sequence[int],
) -> Tensor:  # fmt: skip
    """The product's summands, summed; each rank gets so many `sizes` of a dim."""
    dtype = _computed_in(x)
    given = x.to(dtype), weight.to(dtype), _cast(bias, dtype)
    made: Tensor = _linear_scatter(*given, comm.number, axis, dim, sizes)
    return made


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
