"""What happens to gradients between the last backward and the optimizer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.runtime.gradsync.base import Held, Lines
from meshwright.runtime.record import What
from meshwright.runtime.tied import gradient


def sum_over_model(held: Sequence[Held], lines: Lines) -> None:
    """Adds up gradients that are summands on model axes: per axis, a flat collective per dtype."""
    for axis, group in lines.model.items():
        partial = [h for h in held if axis in h.param.sum_over and h.param.requires_grad]
        for dtype in dict.fromkeys(h.tensor.dtype for h in partial):
            found = [gradient(h) for h in partial if h.tensor.dtype == dtype]
            _sum_flat(found, axis, group, lines)


def _sum_flat(
    gradients: Sequence[Tensor], axis: str, group: dist.ProcessGroup | None, lines: Lines
) -> None:
    if group is None:
        return
    flat = torch.cat([part.reshape(-1) for part in gradients])
    what = What("gradients", lines.stage, axis, "all_reduce", flat.nbytes, group.size())
    with lines.recorder.collective(what):
        dist.all_reduce(flat, group=group)
    sizes = [part.numel() for part in gradients]
    for part, summed in zip(gradients, torch.split(flat, sizes), strict=True):
        part.copy_(summed.view(part.shape))


def global_norm(held: Sequence[Held], device: torch.device, world_size: int) -> Tensor:
    """2-norm over all elements of all gradients of the job, each once, in float64.

    `held` are those of this rank that it stands for.
    """
    squares = [h.tensor.grad.double().square().sum() for h in held if h.tensor.grad is not None]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    total = total.to(device)
    if world_size > 1:
        dist.all_reduce(total)
    return total.sqrt()


def scale(held: Sequence[Held], factor: Tensor | float) -> None:
    for h in held:
        if h.tensor.grad is not None:
            h.tensor.grad.mul_(factor)


def clip(
    held: Sequence[Held],
    counted: Sequence[Held],
    max_norm: float,
    device: torch.device,
    world_size: int,
) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm."""
    norm = global_norm(counted, device, world_size)
    scale(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch.nn.utils.clip_grad_norm_
    return norm
