"""Kronecker factors of layers: of what they read and of the gradients of what they made, and what
both make of the gradient of a weight (Martens and Grosse 2015; convolutions: Grosse and Martens
2016)."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from meshwright.forms.running import Slot

Window = tuple[tuple[int, ...], ...]


class Tapped(torch.autograd.Function):
    """What a layer made, as it is; its backward shows what the layer read, and the gradient."""

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, read: Tensor, seen: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(read)
        ctx.seen = seen
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (read,) = ctx.saved_tensors
        ctx.seen(read, gradients[0])
        return gradients[0], None, None


@dataclass(frozen=True, slots=True)
class FactorRules:
    """How factors are kept and used."""

    damping: float
    decay: float
    """Of the running mean."""


class LayerFactors:
    """The factors of one layer on one rank: sums over what this rank has seen in a step, and at its
    owner what they have come to."""

    def __init__(self, weight: Slot, bias: Slot | None) -> None:
        self.weight, self.bias = weight, bias
        self.out = weight.whole.shape[0]
        self.columns = weight.whole.numel() // self.out + (bias is not None)
        self.means: tuple[Tensor, Tensor] | None = None
        """[columns, columns] of what is read, [out, out] of gradients; at the owner only."""
        self.inverses: tuple[Tensor, Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Nothing has been seen in this step."""
        like = self.weight.whole.detach()
        self.read = like.new_zeros((self.columns, self.columns))
        self.gradients = like.new_zeros((self.out, self.out))
        self.rows = self.samples = 0

    @property
    def path(self) -> str:
        return self.weight.param.fqn

    @property
    def size(self) -> int:
        """Values of its message: an upper triangle of each factor, rows and samples."""
        c, o = self.columns, self.out
        return c * (c + 1) // 2 + o * (o + 1) // 2 + 2

    @torch.no_grad()
    def see(self, read: Tensor, gradient: Tensor, window: Window) -> None:
        """Adds what the layer read and the gradient of what it made, of some samples."""
        if window:
            stride, padding, dilation = window
            kernel = self.weight.whole.shape[2:]
            patches = torch.nn.functional.unfold(read, kernel, dilation, padding, stride)
            rows = patches.transpose(1, 2).reshape(-1, patches.shape[1])
            grads = gradient.flatten(2).transpose(1, 2).reshape(-1, self.out)
        else:
            rows = read.reshape(-1, read.shape[-1])
            grads = gradient.reshape(-1, self.out)
        rows, grads = rows.to(self.read.dtype), grads.to(self.read.dtype)
        if self.bias is not None:
            rows = torch.cat([rows, rows.new_ones((len(rows), 1))], 1)
        self.read.addmm_(rows.t(), rows)
        self.gradients.addmm_(grads.t(), grads)
        self.rows += len(rows)
        self.samples += len(read)

    def pack(self, into: Tensor) -> None:
        """Writes what has been seen as a message of `size` values, and forgets it."""
        parts = [_triangle(self.read), _triangle(self.gradients)]
        counts = into.new_tensor([float(self.rows), float(self.samples)])
        torch.cat([*parts, counts], out=into)
        self.clear()

    def take(self, message: Tensor, rules: FactorRules) -> bool:
        """The sum of all ranks' messages becomes part of the running means. Returns whether
        anybody has seen anything."""
        c, o = self.columns, self.out
        read, gradients, counts = torch.split(
            message, [c * (c + 1) // 2, o * (o + 1) // 2, 2]
        )  # fmt: skip
        rows, samples = counts.tolist()
        if not rows:
            return False
        # Gradients are of the mean over samples; a sample's own are as many times larger, and their
        # squares divided by the number of samples.
        new = _square(read, c) / rows, _square(gradients, o) * samples
        if self.means is None:
            self.means = new
        else:
            self.means = tuple(
                rules.decay * old + (1 - rules.decay) * now
                for old, now in zip(self.means, new, strict=True)
            )
        return True

    def invert(self, rules: FactorRules) -> None:
        """Inverts the means, damped in the ratio of their traces."""
        assert self.means is not None
        read, gradients = self.means
        ratio = (read.trace() / self.columns) / (gradients.trace() / self.out)
        pi = sqrt(float(ratio)) if 0 < float(ratio) < float("inf") else 1.0
        root = sqrt(rules.damping)
        self.inverses = _inverse(read, root * pi), _inverse(gradients, root / pi)

    def precondition(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns what becomes of the gradients of the weight and the bias, in their shapes."""
        assert self.inverses is not None
        matrix = weight.reshape(self.out, -1)
        if bias is not None:
            matrix = torch.cat([matrix, bias.reshape(-1, 1)], 1)
        read, gradients = self.inverses
        found = gradients @ matrix @ read
        if bias is None:
            return found.view(weight.shape), None
        return found[:, :-1].reshape(weight.shape), found[:, -1].reshape(bias.shape)


def _triangle(x: Tensor) -> Tensor:
    first, second = torch.triu_indices(len(x), len(x), device=x.device)
    return x[first, second]


def _square(triangle: Tensor, size: int) -> Tensor:
    """A symmetric matrix of its upper triangle."""
    first, second = torch.triu_indices(size, size, device=triangle.device)
    found = triangle.new_zeros((size, size))
    found[first, second] = triangle
    found[second, first] = triangle
    return found


def _inverse(x: Tensor, damping: float) -> Tensor:
    """By a Cholesky factor; by eigenvalues where rounding has left none."""
    damped = x + damping * torch.eye(len(x), dtype=x.dtype, device=x.device)
    factor, info = torch.linalg.cholesky_ex(damped)
    if not int(info):
        return torch.cholesky_inverse(factor)
    values, vectors = torch.linalg.eigh(x)
    found: Tensor = (vectors / (values.clamp_min(0) + damping)) @ vectors.t()
    return found
