"""Odd models that change tensors in place, or weights and buffers while they run."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attack.odd_nets import Net


class OnInput(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x.clone().mul_(2), y)


class OnGivenInput(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x *= 2
        return super().forward(x, y)


def written_views(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, :4] *= 2
    h.t()[4:].add_(1)
    h.view(-1)[::3] = 0
    h.diagonal().mul_(3)
    return torch.tanh(h)


def masked_writes(h: Tensor) -> Tensor:
    h = h.clone()
    h.masked_fill_(h > 1, 1.0)
    h[h < -1] = -1.0
    h[torch.tensor([0, 2]), 1] = 0.5
    h.scatter_(1, torch.zeros(8, 1, dtype=torch.int64), 0.5)
    return h.index_add(0, torch.tensor([0, 2]), h[:2])


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.requires_grad_(False)


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.requires_grad_(True)
        return super().forward(x, y)


class FrozenInside(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return super().forward(x, y)


class ByData(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.a.weight.data.sum()


class DataWritten(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.data.mul_(0.9)
        return super().forward(x, y)


class DataAssigned(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight.data = self.a.weight.data * 0.9
        return super().forward(x, y)


class Updated(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.copy_(self.a.weight / self.a.weight.norm())
        return super().forward(x, y)


class Averaged(Net):
    """A teacher in buffers that follows the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", self.a.weight.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.mul_(0.9).add_(self.a.weight, alpha=0.1)
        target = F.linear(x, self.w)
        return super().forward(x, y) + (self.a(x) - target).pow(2).mean()


def detached(h: Tensor) -> Tensor:
    z = h * 2
    z.detach_()
    return h + z


def by_data(h: Tensor) -> Tensor:
    z = h.clone()
    z.data.mul_(2)
    return z + h.data


class PlainAttribute(Net):
    def __init__(self) -> None:
        super().__init__()
        self.past = torch.zeros(8).double()

    def between(self, h: Tensor) -> Tensor:
        h = h + self.past
        self.past.copy_(h.detach().mean(0))
        return torch.tanh(h)


class GrownBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 8).double())

    def between(self, h: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, h.detach()[:1]])
        return torch.tanh(h) + self.seen.sum(0)


class Normed(Net):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = kind().double()

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(h))


class Evaluated(Net):
    """Part of it stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double().eval()

    def train(self, mode: bool = True) -> "Evaluated":
        super().train(mode)
        self.norm.eval()
        return self

    def between(self, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(h))


class NoGrad(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h * 2
        with torch.no_grad():
            h.clamp_(-1, 1)
        return h


def through_detach(h: Tensor) -> Tensor:
    z = h * 2
    z.detach().mul_(3)
    return z
