"""How far two computations of the same step may lie apart, and the first tensor that is farther."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

import torch
from torch import Tensor

from meshwright.ir.graph.graph import Graph

_TOO_NARROW = ("float8_e4m3fn", "float8_e5m2")
_SHARE = 1 / 8
"""A gradient may be off by so much of what the largest of all gradients may: one that is as good as
zero (of the bias of attention keys) is made of the rounding of what is not."""


_ROUNDED = 2.0
"""Two computations in narrow numbers lie on both sides of that in wide ones."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs by more than rounding explains."""

    what: str
    """`the gradient of 'h.0.weight'`."""
    by: float
    """Largest difference of an element."""
    allowed: float
    why: str = ""
    """What differs, if that is no number."""

    def __str__(self) -> str:
        if self.why:
            return f"{self.what} {self.why}"
        return f"{self.what} differs by {self.by:.3g}; rounding explains at most {self.allowed:.3g}"


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What one step makes before the optimizer: by module path, on the CPU."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    """None: the step gives the parameter no gradient."""
    buffers: Mapping[str, Tensor]
    rounded: Mapping[str, float] = field(default_factory=dict)
    """Gradients of narrow numbers: how far elements lie from those of wide ones, at most."""

    @property
    def is_finite(self) -> bool:
        found = [g for g in self.gradients.values() if g is not None]
        return isfinite(self.loss) and all(bool(torch.isfinite(g).all()) for g in found)


def rounding(graph: Graph) -> float:
    """The relative error that a step of the graph may make: the root of the rounding of its
    narrowest floating-point type."""
    dtypes = {getattr(torch, t.dtype) for t in graph.tensors.values() if t.dtype not in _TOO_NARROW}
    steps = [torch.finfo(d).eps for d in dtypes if d.is_floating_point or d.is_complex]
    return float(max(steps) ** 0.5)


def first_difference(
    found: StepOutcome, wanted: StepOutcome, rounding: float
) -> TensorDifference | None:
    """Of the losses, then the gradients, then the buffers."""
    by, allowed = abs(found.loss - wanted.loss), rounding * abs(wanted.loss)
    if not by <= allowed:
        return TensorDifference("the loss", by, allowed)
    share = _SHARE * rounding * max(_size(g) for g in wanted.gradients.values() if g is not None)
    for name, gradient in wanted.gradients.items():
        what = f"the gradient of {name!r}"
        least = share + _ROUNDED * wanted.rounded.get(name, 0.0)
        if differs := _gradient(what, found.gradients.get(name), gradient, rounding, least):
            return differs
    for name, buffer in wanted.buffers.items():
        if name in found.buffers:
            what = f"the buffer {name!r} after the step"
            if differs := _tensor(what, found.buffers[name], buffer, rounding, 0.0):
                return differs
    return None


def first_update(
    before: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    rounding: float,
) -> TensorDifference | None:
    """Of the parameters after the optimizer has stepped with the same gradients; what counts is
    how far they have moved."""
    for name, after in wanted.items():
        if name not in found:
            continue
        eps = torch.finfo(after.dtype).eps if after.is_floating_point() else 0.0
        what, here = f"the step of the optimizer on {name!r}", before[name]
        moved, asked = found[name].to(_wide(after)) - here, after.to(_wide(after)) - here
        if differs := _tensor(what, moved, asked, rounding, 4 * eps * _size(after)):
            return differs
    return None


def _gradient(
    what: str, found: Tensor | None, wanted: Tensor | None, rounding: float, share: float
) -> TensorDifference | None:
    if found is None and wanted is None:
        return None
    if found is None or wanted is None:
        has = "None, where PyTorch has one" if found is None else "there, where PyTorch has None"
        # Zero and None are one to a model, not to an optimizer: weights decay only with the first.
        return TensorDifference(what, inf, 0.0, f"is {has}")
    return _tensor(what, found, wanted, rounding, share)


def _tensor(
    what: str, found: Tensor, wanted: Tensor, rounding: float, least: float
) -> TensorDifference | None:
    if found.shape != wanted.shape:
        why = f"has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        return TensorDifference(what, inf, 0.0, why)
    if not wanted.numel():
        return None
    by = float((found.to(_wide(wanted)) - wanted.to(_wide(wanted))).abs().max())
    exact = not (wanted.is_floating_point() or wanted.is_complex())
    allowed = 0.0 if exact else rounding * _size(wanted) + least
    return None if by <= allowed else TensorDifference(what, by, allowed)


def _size(x: Tensor) -> float:
    return float(x.detach().to(_wide(x)).abs().max()) if x.numel() else 0.0


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64
