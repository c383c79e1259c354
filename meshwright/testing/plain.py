"""A step of plain PyTorch, which jobs are compared with."""

from typing import Any

import torch
from torch import nn

from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch


def plain_step(
    model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Any, parts: int = 1
) -> float:
    """Take one step and give its loss; gradients of `parts` of the batch are summed."""
    values = flatten_batch(batch)
    step = TrainingStep(model, loss_fn, tuple(values))
    optimizer.zero_grad()
    total = 0.0
    for part in zip(*(tensor.chunk(parts) for tensor in values.values()), strict=True):
        loss = step(*part) / parts
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total
