"""Plain PyTorch beside a job: the same model, batch and optimizer, without meshwright.

`Copies` keeps what a job in `bf16` keeps: float32 parameters, which are stepped, and bfloat16
copies, which are computed with; modules with running statistics stay in float32. `Autocast` is
what most scripts do: float32 parameters that `torch.autocast` casts at each use. Both use torch's
fused AdamW and the attention that the model's library chooses.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.workloads import Batch

LR = 1e-4
Loss = Callable[..., Tensor] | None


def _loss(model: nn.Module, loss_fn: Loss, batch: Batch) -> Tensor:
    if isinstance(batch, dict):
        found: Any = model(**batch)
        return found.loss  # type: ignore[no-any-return]
    assert loss_fn is not None
    *inputs, labels = batch
    return loss_fn(model(*inputs), labels)


class Autocast:
    """Float32 parameters under autocast to bfloat16."""

    def __init__(self, model: nn.Module, loss_fn: Loss, device: str) -> None:
        self.model, self.loss_fn, self.device = model, loss_fn, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(self, batch: Batch) -> Tensor:
        """Trains on the batch; its loss, which is not waited for."""
        with torch.autocast(self.device, torch.bfloat16):
            loss = _loss(self.model, self.loss_fn, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Copies:
    """Bfloat16 copies of float32 parameters."""

    def __init__(self, model: nn.Module, loss_fn: Loss, device: str) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.wide = [p.detach().clone() for p in model.parameters()]
        for module in model.modules():
            if not hasattr(module, "running_mean"):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(torch.bfloat16)
        self.narrow = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.wide, lr=LR, fused=True)

    def step(self, batch: Batch) -> Tensor:
        """Trains on the batch; its loss, which is not waited for."""
        loss = _loss(self.model, self.loss_fn, _narrowed(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            wide.grad = None if narrow.grad is None else narrow.grad.float()
            narrow.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.narrow, self.wide)
        return loss.detach()


def _narrowed(batch: Batch) -> Batch:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor

    if isinstance(batch, dict):
        return {name: cast(tensor) for name, tensor in batch.items()}
    return tuple(map(cast, batch))
