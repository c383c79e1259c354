"""What happens to gradients between the last backward and the optimizer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from meshwright.forms.running import Held, Lines
from meshwright.ir.comm.collective import What
from meshwright.runtime.step.tied import gradient
from meshwright.runtime.step.updates import FormOptimizer


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
    """2-norm over all elements of all gradients of the job, each once, summed up in float64.

    `held` are those of this rank that it stands for.
    """
    found = [_no_narrower(h.tensor.grad) for h in held if h.tensor.grad is not None]
    # The norm of nothing is of the host, and to bring it to the device would wait for that.
    norm = get_total_norm(found) if found else torch.zeros((), device=device)
    total = norm.to(device, torch.float64).square()
    if world_size > 1:
        dist.all_reduce(total)
    return total.sqrt()


def _no_narrower(gradient: Tensor) -> Tensor:
    """Stands for the gradient in a norm: a half-precision norm would depend on how it is split."""
    narrow = gradient.element_size() < 4
    return torch.linalg.vector_norm(gradient, dtype=torch.float32) if narrow else gradient


def scale(held: Sequence[Held], factor: Tensor | float) -> None:
    for h in held:
        if h.tensor.grad is not None:
            h.tensor.grad.mul_(factor)


def scaled(
    optimizer: torch.optim.Optimizer, held: Sequence[Held], counted: Sequence[Held],
    gradient_scale: Tensor | float, max_norm: float | None, device: torch.device, world_size: int,
) -> Tensor | None:  # fmt: skip
    """Scales all gradients, and limits their global norm, which comes back if there is a limit. An
    optimizer that scales what it reads is told the factor instead."""
    if isinstance(optimizer, FormOptimizer):
        optimizer.factor = torch.ones((), dtype=torch.float64, device=device) * gradient_scale
        if max_norm is None:
            return None
        norm = global_norm(counted, device, world_size) * gradient_scale
        # As torch limits it.
        optimizer.factor *= torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm
    if isinstance(gradient_scale, Tensor) or gradient_scale != 1.0:
        scale(held, gradient_scale)
    return None if max_norm is None else clip(held, counted, max_norm, device, world_size)


def clip(
    held: Sequence[Held],
    counted: Sequence[Held],
    max_norm: float,
    device: torch.device,
    world_size: int,
) -> Tensor:
    """Scales all gradients so that their global norm is at most `max_norm`; returns the norm."""
    norm = global_norm(counted, device, world_size)
    clip_grads_with_norm_([h.tensor for h in held], max_norm, norm)
    return norm
