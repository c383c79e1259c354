"""Sums of gradients while a dispatch mode watches: as if nobody did.

Autograd adds a second gradient of a value to the first in place where nobody else has that. Under a
mode it makes a third tensor, so a step that is watched would hold more than one that is not.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.torch_private import (
    DispatchMode,
    backward_node,
    storage_key,
    uses,
    wraps_tensors,
)

_SUM, _IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


class Sums:
    """What a mode knows of the gradients of one backward."""

    def __init__(self) -> None:
        self._of_own = _uses_of_own()
        self._made_by: dict[int, int] = {}
        """Memory made in a backward -> the node that made it, by its number."""

    def as_unwatched(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Returns the operator that would be called if nobody watched."""
        own = func is _SUM and self._is_own(args[0]) and self._is_autograds(*args)
        return _IN_PLACE if own else func

    def note(self, func: Any, made: Sequence[Tensor]) -> None:
        """Takes down what an operator has made."""
        if func is not _IN_PLACE and (node := backward_node()) is not None:
            for x in made:
                if not wraps_tensors(x):
                    self._made_by[storage_key(x)] = node._sequence_nr()

    def _is_own(self, x: Any) -> bool:
        return not wraps_tensors(x) and _uses(x) == self._of_own

    def _is_autograds(self, first: Tensor, second: Any, *_: Any) -> bool:
        node = backward_node()
        if node is None or not isinstance(second, Tensor) or torch.is_grad_enabled():
            return False
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False  # a sum of somebody's own, whose result may be another kind of tensor
        if not torch.ops.aten.is_non_overlapping_and_dense.default(first):
            return False
        by, number = self._made_by.get(storage_key(first)), node._sequence_nr()
        # Two that one node has made: its own sum, unless it has two gradients for one value.
        return by != number or len(set(node.next_functions)) < len(node.next_functions)


def _uses(x: Any) -> tuple[int, ...]:
    return *uses(x), sys.getrefcount(x)


class _Probe(DispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _SUM and backward_node() is not None:
            self._note(args[0])
        return func(*args, **(kwargs or {}))

    def _note(self, x: Any) -> None:  # by as many calls as `Sums` takes to look
        self.found.append(_uses(x))


@cache
def _uses_of_own() -> tuple[int, ...]:
    """Uses, as a mode finds them, of a gradient that nobody but autograd has."""
    probe = _Probe()
    with torch.inference_mode(False), torch.enable_grad(), probe:
        x = torch.ones(2, requires_grad=True)
        torch.autograd.backward([x.sin() + x.cos()], [torch.ones(2)])
    return probe.found[0]
