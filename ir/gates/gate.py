"""What an expert computes between its two products, and its derivative, as plain functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Tensors = tuple[torch.Tensor, ...]
Settings = Mapping[str, float]
Function = Callable[[Tensors, Settings], torch.Tensor]
"""(gate, up) or, without a gate, (up,): what both products gave, each [pairs, I] -> [pairs, I]."""
Derivative = Callable[[torch.Tensor, Tensors, Settings], Tensors]
"""The gradient of the result and the operands -> the gradients of the operands. Not by autograd:
inside an operator that someone watches (a dispatch mode) there is none."""


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """A file of `ir/gates`."""

    forward: Function
    backward: Derivative
    settings: tuple[str, ...] = ()
    """Names of numbers that a text has to give: `clamped-silu limit=7.0`."""
    parts: frozenset[int] = frozenset({1, 2})
    """How many operands it takes: 1 without a gate, 2 with one."""
    at_once: Mapping[int, float] = field(default_factory=lambda: {1: 5, 2: 8})
    """By how many operands it takes: values as large as one that its backward has made and still
    has, at most, its results among them."""
    flags: int = 0
    """Of one byte each, what comparisons have made, beside these."""


def pointwise(
    value: Callable[[torch.Tensor], torch.Tensor],
    slope: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    at_once: int = 1,
) -> ExpertGate:
    """The gate of an activation: it alone, or it times `up`. `slope`: (grad, x) -> grad of x, which
    has so many values as large as x `at_once`, its result among them."""

    def forward(parts: Tensors, _: Settings) -> torch.Tensor:
        return value(parts[0]) if len(parts) == 1 else value(parts[0]) * parts[1]

    def backward(grad: torch.Tensor, parts: Tensors, _: Settings) -> Tensors:
        if len(parts) == 1:
            return (slope(grad, parts[0]),)
        gate, up = parts
        return slope(grad * up, gate), grad * value(gate)

    beside = {1: at_once, 2: max(3, at_once + 1)}
    return ExpertGate(forward, backward, at_once=beside)


def inside(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Where a clamp hands gradients on, its ends included."""
    return (x >= low) & (x <= high)
