"""Kronecker factors of layers: of what they read and of the gradients of what they made, and what
both make of the gradient of a weight (Martens and Grosse 2015; convolutions: Grosse and Martens
2016; in an eigenbasis: George et al. 2018, Pauloski et al. 2021)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from meshwright.forms.running import Slot

Window = tuple[tuple[int, ...], ...]
READ, GRADIENTS = 0, 1
"""Numbers of a layer's factors."""


class Tapped(torch.autograd.Function):
    """What a layer made, as it is; its backward shows the gradient."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        ctx.seen = seen
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.seen(gradients[0])
        return gradients[0], None


@dataclass(frozen=True, slots=True)
class FactorRules:
    """How factors are kept and used in a step."""

    damping: float
    decay: float
    """Of the running mean."""
    eigen: bool = False
    """Damping is added to products of eigenvalues, and not to each factor."""


class LayerFactors:
    """The factors of one layer on one rank: sums over what this rank has seen in a step, and where
    gradients are preconditioned what they have come to."""

    def __init__(self, weight: Slot, bias: Slot | None) -> None:
        self.weight, self.bias = weight, bias
        self.out = weight.whole.shape[0]
        self.columns = weight.whole.numel() // self.out + (bias is not None)
        self.dims = self.columns, self.out
        self.means: list[Tensor | None] = [None, None]
        """[columns, columns] of what is read, [out, out] of gradients."""
        self.bases: list[Base | None] = [None, None]
        """What the means have come to, when they were last looked at."""
        self.clear()

    def clear(self) -> None:
        """Nothing has been seen in this step."""
        like = self.weight.whole.detach()
        self.sums = [like.new_zeros((n, n)) for n in self.dims]
        self.counts = [0, 0]
        """Rows that were read, and samples of which there are gradients."""

    @property
    def path(self) -> str:
        return self.weight.param.fqn

    @torch.no_grad()
    def see_read(self, read: Tensor, window: Window) -> None:
        """Adds what the layer read of some samples."""
        if window:
            stride, padding, dilation = window
            kernel = self.weight.whole.shape[2:]
            patches = torch.nn.functional.unfold(read, kernel, dilation, padding, stride)
            rows = patches.transpose(1, 2).reshape(-1, patches.shape[1])
        else:
            rows = read.reshape(-1, read.shape[-1])
        total = self.sums[READ]
        rows = rows.to(total.dtype)
        if self.bias is not None:
            rows = torch.cat([rows, rows.new_ones((len(rows), 1))], 1)
        total.addmm_(rows.t(), rows)
        self.counts[READ] += len(rows)

    @torch.no_grad()
    def see_gradient(self, gradient: Tensor, window: Window) -> None:
        """Adds the gradient of what it made of them."""
        grads = gradient.flatten(2).transpose(1, 2) if window else gradient
        total = self.sums[GRADIENTS]
        grads = grads.reshape(-1, self.out).to(total.dtype)
        total.addmm_(grads.t(), grads)
        self.counts[GRADIENTS] += len(gradient)

    def pack(self, factor: int, into: Tensor) -> None:
        """Writes what has been seen of a factor as a message of `message_size` values, and forgets
        it."""
        fold(self.sums[factor], into[:-1])
        into[-1] = float(self.counts[factor])
        self.sums[factor].zero_()
        self.counts[factor] = 0

    def take(self, factor: int, message: Tensor, rules: FactorRules) -> bool:
        """The sum of all ranks' messages becomes part of the running mean. Returns whether anybody
        has seen anything."""
        count = float(message[-1])
        if not count:
            return False
        new = unfold(message[:-1], self.dims[factor])
        # Gradients are of the mean over samples; a sample's own are as many times larger, and their
        # squares divided by the number of samples.
        new *= 1 / count if factor == READ else count
        old = self.means[factor]
        if old is None:
            self.means[factor] = new
        else:
            old.mul_(rules.decay).add_(new, alpha=1 - rules.decay)
        return True

    def invert(self, factor: int, rules: FactorRules) -> None:
        """Makes of a mean what gradients are multiplied with: damped in the ratio of the traces, or
        its eigenvectors."""
        mean = self.means[factor]
        assert mean is not None
        if rules.eigen:
            values, vectors = torch.linalg.eigh(mean)
            self.bases[factor] = Base(vectors, values.clamp_min(0))
        else:
            self.bases[factor] = Base(_inverse(mean, self._damping(factor, rules)), None)

    def hand_over(self, factor: int, into: Tensor) -> None:
        """Writes a factor's base as a message of `base_size` values, and lets go of it: it comes
        back with the others', and is not there twice meanwhile."""
        base, self.bases[factor] = self.bases[factor], None
        assert base is not None
        base.pack(into)

    def _damping(self, factor: int, rules: FactorRules) -> float:
        read, gradients = self.means
        assert read is not None and gradients is not None
        ratio = float((read.trace() / self.columns) / (gradients.trace() / self.out))
        pi = sqrt(ratio) if 0 < ratio < float("inf") else 1.0
        return sqrt(rules.damping) * (pi if factor == READ else 1 / pi)

    def precondition(
        self, weight: Tensor, bias: Tensor | None, rules: FactorRules
    ) -> tuple[Tensor, Tensor | None]:
        """Returns what becomes of the gradients of the weight and the bias, in their shapes."""
        read, gradients = self.bases
        assert read is not None and gradients is not None
        matrix = weight.reshape(self.out, -1)
        if read.values is None or gradients.values is None:
            found = gradients.matrix @ matrix
            if bias is None:
                return (found @ read.matrix).view(weight.shape), None
            # The last column apart: matrices of an odd width are slow to copy and to multiply.
            last = gradients.matrix @ bias
            inside, beside = read.matrix[:-1, :-1], read.matrix[-1, :-1]
            whole = torch.addr(found @ inside, last, beside)
            return whole.view(weight.shape), found @ beside + last * read.matrix[-1, -1]
        if bias is not None:
            matrix = torch.cat([matrix, bias.reshape(-1, 1)], 1)
        turned = gradients.matrix.t() @ matrix @ read.matrix
        turned /= torch.outer(gradients.values, read.values).add_(rules.damping)
        found = gradients.matrix @ turned @ read.matrix.t()
        if bias is None:
            return found.view(weight.shape), None
        return found[:, :-1].reshape(weight.shape), found[:, -1].reshape(bias.shape)


@dataclass(frozen=True, eq=False)
class Base:
    """What a factor has come to."""

    matrix: Tensor
    """[n, n]: its damped inverse, or its eigenvectors as columns."""
    values: Tensor | None
    """[n]: its eigenvalues; None with an inverse."""

    def pack(self, into: Tensor) -> None:
        """Writes `base_size` values."""
        if self.values is None:
            fold(self.matrix, into)
        else:
            torch.cat([self.matrix.reshape(-1), self.values], out=into)

    @classmethod
    def unpack(cls, flat: Tensor, size: int, *, eigen: bool) -> "Base":
        """Reads what `pack` wrote of a factor of a size."""
        if not eigen:
            return cls(unfold(flat, size), None)
        return cls(flat[: size * size].view(size, size).clone(), flat[size * size :].clone())


def message_size(size: int) -> int:
    """Returns the values of the message of a factor: an upper triangle and a count."""
    return size * (size + 1) // 2 + 1


def base_size(size: int, *, eigen: bool) -> int:
    """Returns the values that go of a base: an upper triangle, or vectors and values."""
    return size * size + size if eigen else size * (size + 1) // 2


def fold(x: Tensor, into: Tensor) -> None:
    """Writes the upper triangle of a symmetric matrix [n, n] to n (n + 1) / 2 values, in blocks:
    one off the diagonal, and both on it in one rectangle (the full packed format of LAPACK)."""
    first, second = _halves(len(x))
    torch.mul(x[:first, first:], 1, out=into[: first * second].view(first, second))
    both = into[first * second :].view(second, first + 1)
    both.zero_()
    both[:, :second] += x[first:, first:].tril()
    both[:first, 1:] += x[:first, :first].triu()


def unfold(flat: Tensor, size: int) -> Tensor:
    """Returns the symmetric matrix that `fold` wrote."""
    first, second = _halves(size)
    found = flat.new_empty((size, size))
    off = flat[: first * second].view(first, second)
    both = flat[first * second :].view(second, first + 1)
    # Turned matrices are made apart: torch copies whole ones in blocks.
    found[:first, first:] = off
    found[first:, :first] = off.t().contiguous()
    low = both[:, :second].tril()
    torch.add(low, low.tril(-1).t().contiguous(), out=found[first:, first:])
    high = both[:first, 1:].triu()
    torch.add(high, high.triu(1).t().contiguous(), out=found[:first, :first])
    return found


def _halves(size: int) -> Sequence[int]:
    return size // 2, size - size // 2


def _inverse(x: Tensor, damping: float) -> Tensor:
    """By a Cholesky factor; by eigenvalues where rounding has left none."""
    damped = x.clone()
    damped.diagonal().add_(damping)
    factor, info = torch.linalg.cholesky_ex(damped)
    if not int(info):
        return torch.cholesky_inverse(factor)
    values, vectors = torch.linalg.eigh(x)
    found: Tensor = (vectors / (values.clamp_min(0) + damping)) @ vectors.t()
    return found
