"""Batch-norm whose statistics are those of the whole micro-batch, over all ranks that share it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.torch_private import backward_reaches


def batch_norm(
    comm: Comm,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
    axes: tuple[str, ...] = (),
    count: int = 0,
    channel_axis: str = "",
    channels: tuple[int, ...] = (),
) -> Tensor:
    """Training-mode batch-norm of [N, C, ...].

    `axes` split the N or later dims: statistics are summed over them, `count` elements for each
    channel. If `channel_axis` splits C while the running statistics are whole, `channels` are the
    channels of each rank.
    """
    if not comm.training:
        mean = _mine(comm, running_mean, channel_axis, channels)
        variance = _mine(comm, running_var, channel_axis, channels)
        return torch.batch_norm(
            input, weight, bias, mean, variance, mean is None, momentum, eps, cudnn_enabled
        )
    axes, count = comm.of_replica(axes, count)
    if not any(comm.line(axis).size > 1 for axis in axes):
        mean = _own(comm, running_mean, channel_axis, channels)
        variance = _own(comm, running_var, channel_axis, channels)
        made = torch.batch_norm(
            input, weight, bias, mean, variance, True, momentum, eps, cudnn_enabled
        )
        for running, now in ((running_mean, mean), (running_var, variance)):
            if running is not None and now is not None and channel_axis:
                running.copy_(comm.all_gather(now, channel_axis, 0, channels))
        return made
    mean, variance, unbiased = _of_all(comm, input.detach(), axes, count)
    _track(comm, running_mean, mean, momentum, channel_axis, channels)
    _track(comm, running_var, unbiased, momentum, channel_axis, channels)
    apply: Callable[..., Tensor] = _Normalise.apply
    return apply(input, weight, bias, mean, torch.rsqrt(variance + eps), comm, axes, count)


def _of_all(
    comm: Comm, x: Tensor, axes: tuple[str, ...], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance, and that without bias, of each channel over all ranks."""
    dims = _but_channels(x)
    mean = _summed(comm, x.sum(dims, dtype=_wide(x)), axes) / count
    variance = _summed(comm, _centred(x, mean).square_().sum(dims), axes) / count
    return mean, variance, variance * (count / max(count - 1, 1))


class _Normalise(torch.autograd.Function):
    """Keeps what it reads, as torch's kernel does, and not what it makes of that on the way. All
    ranks have the statistics, so that each has a part of their gradients, which are summed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        comm: Comm,
        axes: tuple[str, ...],
        count: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.comm, ctx.axes, ctx.count = comm, axes, count
        result = _centred(x, mean).mul_(_along(scale, x))
        if weight is not None:
            result.mul_(_along(weight, x))
        if bias is not None:
            result.add_(_along(bias, x))
        return result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight, mean, scale) = gradients, ctx.saved_tensors
        nodes = [node for node, _ in ctx.next_functions[:3]]
        wanted = [
            needed and backward_reaches([node])
            for needed, node in zip(ctx.needs_input_grad, nodes, strict=False)
        ]
        dims, centred = _but_channels(x), _centred(x, mean)
        total = gradient.sum(dims, dtype=mean.dtype)
        slope = (centred * gradient).sum(dims) * scale
        found: list[Tensor | None] = [None, slope, total]
        if wanted[0]:
            total, slope = (_summed(ctx.comm, x, ctx.axes) / ctx.count for x in (total, slope))
            made = centred.mul_(_along(-slope * scale, x)).add_(gradient).sub_(_along(total, x))
            made.mul_(_along(scale, x))
            if weight is not None:
                made.mul_(_along(weight, x))
            found[0] = made.to(x.dtype)
        kept = [one if is_wanted else None for one, is_wanted in zip(found, wanted, strict=True)]
        return *kept, None, None, None, None, None


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """Values less their channel's mean, in its dtype; a tensor of their own."""
    if x.dtype == mean.dtype:
        return x - _along(mean, x)
    return x.to(mean.dtype).sub_(_along(mean, x))


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, for all elements of x."""
    return channels.view([1, -1] + [1] * (x.ndim - 2))


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _wide(x: Tensor) -> torch.dtype:
    """The dtype that torch's kernel adds up in."""
    return torch.float32 if x.element_size() < 4 else x.dtype


def _summed(comm: Comm, x: Tensor, axes: tuple[str, ...]) -> Tensor:
    for axis in axes:
        x = comm.sum_over(x, axis)
    return x


def _mine(
    comm: Comm, running: Tensor | None, axis: str, channels: tuple[int, ...]
) -> Tensor | None:
    return running if running is None or not axis else comm.slice(running, axis, 0, channels)


def _own(comm: Comm, running: Tensor | None, axis: str, channels: tuple[int, ...]) -> Tensor | None:
    """A copy where channels are split: autograd has it, so that nobody may change it later."""
    mine = _mine(comm, running, axis, channels)
    return mine if mine is None or not axis else mine.clone()


def _track(
    comm: Comm,
    running: Tensor | None,
    now: Tensor,
    momentum: float,
    axis: str,
    channels: tuple[int, ...],
) -> None:
    if running is None:
        return
    if axis:
        now = comm.all_gather(now, axis, 0, channels)
    running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
