"""Cross-entropy over classes that ranks share, by kernels that keep no probabilities."""

# mypy: disallow-untyped-defs=False

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.kernels import linear_cross_entropy as linear_cross_entropy_kernel
from meshwright.ir.kernels.cross_entropy import parts, total_gradient, total_of

Parts = tuple[Tensor, Tensor, Tensor]
"""Per token the largest logit, the sum relative to it, and the target's."""


class _Total(torch.autograd.Function):
    """Ranks exchange three numbers per token, and each makes the gradient of its own classes."""

    @staticmethod
    def forward(ctx, logits, target, comm, axes, start, classes, ignore_index):
        found = _of_all(comm, parts(logits, target, start), axes)
        return _totalled(ctx, found, (logits, target), start, classes, ignore_index)

    @staticmethod
    def backward(ctx, grad, *_):
        back = total_gradient(grad, ctx.saved_tensors, ctx.start, ctx.ignore_index)
        return back, None, None, None, None, None, None


def _of_all(comm: Comm, found: Parts, axes: Sequence[str]) -> Parts:
    """What all ranks' classes have together."""
    own, total, picked = found
    largest = own
    for axis in axes:
        largest = comm.max_over(largest, axis)
    sums = torch.stack([total * (own - largest).exp(), picked])
    for axis in axes:
        sums = comm.all_reduce(sums, axis, "identity")
    total, picked = sums.unbind(0)
    return largest, total, picked


def _totalled(
    ctx: Any, found: Parts, given: Sequence[Tensor], start: int, classes: int, ignore_index: int
) -> Parts:
    """The loss, with what a backward needs besides what was `given`, targets last."""
    largest, total, _ = found
    ctx.save_for_backward(*given, largest, total)
    ctx.start, ctx.ignore_index = start, ignore_index
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(largest, total)
    return total_of(found, given[-1], classes, ignore_index), largest, total


class _LinearTotal(torch.autograd.Function):
    """The same of a product whose logits are made some rows at a time, each way."""

    @staticmethod
    def forward(ctx, x, weight, target, comm, axes, start, classes, ignore_index):
        x = x.contiguous()
        own = linear_cross_entropy_kernel.parts(x, weight, target, start)
        found = _of_all(comm, own, axes)
        return _totalled(ctx, found, (x, weight, target), start, classes, ignore_index)

    @staticmethod
    def backward(ctx, grad, *_):
        back = linear_cross_entropy_kernel.total_gradients(
            grad, ctx.saved_tensors, ctx.start, ctx.ignore_index
        )
        return *back, None, None, None, None, None, None


def cross_entropy_total(
    comm: Comm,
    logits: Tensor,
    target: Tensor,
    axes: tuple[str, ...],
    start: int,
    size: int,
    classes: int,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """`meshwright.cross_entropy_total` of logits [tokens, size], columns from `start` of `classes`;
    the sum is whole on every rank."""
    assert logits.shape[1] == size
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Total.apply
    return apply(logits, target, comm, axes, start, classes, ignore_index)


def linear_cross_entropy(
    comm: Comm,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    axes: tuple[str, ...],
    start: int,
    size: int,
    classes: int,
    ignore_index: int = -100,
) -> Parts:
    """`meshwright.linear_cross_entropy` of a weight [size, width], rows from `start` of `classes`;
    the sum is whole on every rank, x's gradient one summand of it."""
    assert len(weight) == size
    apply: Callable[..., Parts] = _LinearTotal.apply
    return apply(x, weight, target, comm, axes, start, classes, ignore_index)
