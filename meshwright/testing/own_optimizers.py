"""Optimizers as users write and copy them, none of which the product knows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class OwnLion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): the sign of a momentum, and decay apart from it."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps all parameters that have gradients."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                mean = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((first * mean + (1 - first) * p.grad).sign_(), alpha=group["lr"])
                mean.mul_(second).add_(p.grad, alpha=1 - second)


class BlockwiseMomentum(torch.optim.Optimizer):
    """Momentum kept in 8 bits, with a scale for each block of 256 elements, as 8-bit optimizers of
    libraries do; parameters of less than 4096 elements have a plain one."""

    BLOCK, LEAST = 256, 4096

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps all parameters that have gradients."""
        for p, grad, lr in _with_gradient(self):
            state = self.state[p]
            mean = self._read(state, p).mul_(0.9).add_(grad)
            self._keep(state, mean)
            p.sub_(mean, alpha=lr)

    def _read(self, state: dict[str, Tensor], p: Tensor) -> Tensor:
        if not state:
            return torch.zeros_like(p)
        if "scale" not in state:
            return state["mean"].clone()
        return _blocks(state["mean"].to(p.dtype), self.BLOCK, state["scale"])

    def _keep(self, state: dict[str, Tensor], mean: Tensor) -> None:
        if mean.numel() < self.LEAST:
            self._put(state, "mean", mean.clone())
            return
        lines = torch.nn.functional.pad(mean.flatten(), (0, -mean.numel() % self.BLOCK))
        scale = lines.view(-1, self.BLOCK).abs().amax(1).clamp_min(1e-30).div_(127)
        self._put(state, "mean", _blocks(mean, self.BLOCK, 1 / scale).round_().to(torch.int8))
        self._put(state, "scale", scale)

    def _put(self, state: dict[str, Tensor], key: str, value: Tensor) -> None:
        if key in state:
            state[key].copy_(value)
        else:
            state[key] = value


class CountedMomentum(BlockwiseMomentum):
    """The same with rates that fall by a count of Python's, and tables that all parameters in
    8 bits share, in a list."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self._tables = [torch.linspace(1.0, 0.5, 8), torch.linspace(0.5, 1.0, 8)]

    def _keep(self, state: dict[str, Any], mean: Tensor) -> None:
        count = state.get("count", 0)
        mean.mul_(state.get("tables", self._tables)[count % 2][count % 8])
        super()._keep(state, mean)
        state["count"] = count + 1
        if "scale" in state:
            state.setdefault("tables", self._tables)


class PairedMomentum(torch.optim.Optimizer):
    """Two means of each gradient, in a list."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps all parameters that have gradients."""
        for p, grad, lr in _with_gradient(self):
            zeros = [torch.zeros_like(p), torch.zeros_like(p)]
            means = self.state[p].setdefault("means", zeros)
            for mean, rate in zip(means, (0.9, 0.5), strict=True):
                mean.mul_(rate).add_(grad)
                p.sub_(mean, alpha=lr)


def _with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor, float]]:
    """The parameters that are stepped, each with its gradient and rate."""
    for group in optimizer.param_groups:
        yield from ((p, p.grad, group["lr"]) for p in group["params"] if p.grad is not None)


def _blocks(x: Tensor, block: int, scale: Tensor) -> Tensor:
    """Each block of elements times its number."""
    return (x.flatten() * scale.repeat_interleave(block)[: x.numel()]).view(x.shape)
