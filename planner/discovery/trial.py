"""One op on small tensors: run whole, and in parts that are put together again."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from meshwright.ir.graph.graph import Arg, Op, Ref
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.saved import call_target

Tensors = tuple[Tensor | None, ...]
NEAR, NOISE = 1e-9, 1e-13
"""Of the largest element, and of what is only rounding of numbers around one."""
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
"""What operators raise on tensors that they do not take; NotImplementedError is among them."""


class CannotRun(Exception):
    """The op refuses these tensors, or does not give as many as the graph says."""


@dataclass(frozen=True, slots=True)
class OpTrial:
    """An op with tensors to try it on."""

    target: str
    args: Mapping[str, Arg]
    """Tensors named by their place among the inputs."""
    inputs: tuple[Tensor, ...]
    live: tuple[bool, ...]
    """Per input, whether it has a gradient."""
    read: tuple[bool, ...]
    """Per output, whether it is a tensor that anybody reads."""

    def forward(self, inputs: Sequence[Tensor]) -> Tensors:
        """Outputs; None for those that nobody reads."""
        numbered = {str(i): x for i, x in enumerate(inputs)}
        try:
            found = call_target(operator(self.target), self.args, numbered)
        except REFUSALS as error:
            raise CannotRun(str(error)) from error
        if len(found) != len(self.read):
            raise CannotRun("its number of results depends on sizes")
        made = tuple(x if read else None for x, read in zip(found, self.read, strict=True))
        if any(read and not isinstance(x, Tensor) for x, read in zip(made, self.read, strict=True)):
            raise CannotRun("a result is missing")
        return made

    def both(self, inputs: Sequence[Tensor], given: Tensors) -> tuple[Tensors, Tensors]:
        """Outputs, and the gradients of the inputs that follow from those of the outputs."""
        leaves = [
            x.detach().clone().requires_grad_(live)
            for x, live in zip(inputs, self.live, strict=True)
        ]
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = self.forward(leaves)
            pairs = [
                (x, g) for x, g in zip(outputs, given, strict=True)
                if x is not None and g is not None and x.requires_grad
            ]  # fmt: skip
            if pairs:
                try:
                    torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
                except REFUSALS as error:
                    raise CannotRun(str(error)) from error
        return tuple(None if x is None else x.detach() for x in outputs), tuple(
            x.grad for x in leaves
        )


def numbered(op: Op) -> dict[str, Arg]:
    """The op's arguments with each tensor named by its place."""
    places = count()
    return {name: _renamed(value, places) for name, value in op.args}


def _renamed(value: Arg, places: Iterator[int]) -> Arg:
    if isinstance(value, Ref):
        return Ref(str(next(places)))
    if isinstance(value, tuple):
        return tuple(_renamed(item, places) for item in value)
    return value


def near(found: Tensors, wanted: Tensors) -> bool:
    """Whether all are equal but for rounding."""
    return all(_near(a, b) for a, b in zip(found, wanted, strict=True))


def _near(found: Tensor | None, wanted: Tensor | None) -> bool:
    if found is None or wanted is None:
        # An absent gradient is one of zeros.
        rest = found if wanted is None else wanted
        return rest is None or not bool(rest.any())
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() and not wanted.is_complex():
        return bool(torch.equal(found, wanted))
    # However small or large all of it is: what an op makes need not be around one.
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    return bool(torch.allclose(found, wanted, rtol=NEAR, atol=NEAR * largest + NOISE))
