"""Plain models whose state is unusual: own gradients, shared weights, buffers that change."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES
from benchmarks.zoo.entry import LENGTH, VOCAB


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class OwnFunction(nn.Module):
    """An MLP whose activation is a custom autograd.Function."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * _Cube.apply(torch.tanh(layer(x)))  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]


class _Rounded(torch.autograd.Function):
    """Rounds forward, lets gradients through: its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class StraightThrough(nn.Module):
    """A quantised MLP with straight-through gradients."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(_Rounded.apply(x)))  # type: ignore[no-untyped-call]
        return self.head(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A language model whose embedding is its head, and whose layers share one norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + F.gelu(layer(self.norm(x)))
        return self.head(x)  # type: ignore[no-any-return]


class Universal(nn.Module):
    """One transformer layer, applied several times."""

    def __init__(self, width: int = 32, times: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.place = nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True)
        self.times = times
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place
        for _ in range(self.times):
            x = self.layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class RunningNorm(nn.Module):
    """Normalises by a running mean that forward updates, and counts its calls."""

    mean: Tensor
    calls: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.second(torch.relu(self.first(x - self.mean)))  # type: ignore[no-any-return]


class Momentum(nn.Module):
    """A buffer that is assigned anew, as moving averages of activations are."""

    average: Tensor

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean(0)
        return self.second(x / (1 + self.average))  # type: ignore[no-any-return]


class Queue(nn.Module):
    """A buffer of the last few means, written to through slices."""

    queue: Tensor

    def __init__(self, width: int = 32, length: int = 4) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(length, width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        with torch.no_grad():
            self.queue[1:] = self.queue[:-1].clone()
            self.queue[0] = x.mean(0)
        return self.second(x - self.queue.mean(0))  # type: ignore[no-any-return]


class Lora(nn.Module):
    """A frozen base with trainable low-rank branches."""

    def __init__(self, width: int = 32, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.a = nn.ParameterList(torch.randn(rank, width) * 0.1 for _ in range(3))
        self.b = nn.ParameterList(torch.randn(width, rank) * 0.1 for _ in range(3))
        self.head = nn.Linear(width, CLASSES)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, a, b in zip(self.base, self.a, self.b, strict=True):
            x = torch.tanh(base(x) + x @ a.T @ b.T)
        return self.head(x)  # type: ignore[no-any-return]
