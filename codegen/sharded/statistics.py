"""Batch-norm whose statistics are those of the whole micro-batch, over all ranks that share it."""

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm


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
    channels of each rank. The summed statistics give each rank a partial gradient, so their
    reduction reduces in backward too.
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
    dims = [0, *range(2, input.ndim)]
    shape = [1, -1] + [1] * (input.ndim - 2)
    wide = input.float() if input.element_size() < 4 else input  # as torch's kernel adds up
    mean = _summed(comm, wide.sum(dims), axes) / count
    centred = wide - mean.view(shape)
    variance = _summed(comm, centred.square().sum(dims), axes) / count
    unbiased = variance.detach() * (count / max(count - 1, 1))
    _track(comm, running_mean, mean.detach(), momentum, channel_axis, channels)
    _track(comm, running_var, unbiased, momentum, channel_axis, channels)
    result = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    shifted = result if bias is None else result + bias.view(shape)
    return shifted.to(input.dtype)


def _summed(comm: Comm, x: Tensor, axes: tuple[str, ...]) -> Tensor:
    for axis in axes:
        x = comm.all_reduce(x, axis, "all_reduce")
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
