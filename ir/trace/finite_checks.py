"""Branches on whether values are finite are taken as they are in training that goes well.

DETR and its kin clamp what has become infinite: `if not torch.isfinite(x).all()`. A plan cannot
have a branch on values, and with the values that it is for the loss is not finite: that is seen.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Tensor = torch.Tensor
_CHECKS = {"isfinite": True, "isinf": False, "isposinf": False, "isneginf": False, "isnan": False}
"""What each of them says of a finite value."""
_OF_ALL = {"all": True, "any": False}
"""The reduction that is of use -> what it says of values that all are as usual."""


class FiniteChecks:
    """What was computed of checks for finite values, and what each is if all are finite."""

    def __init__(self) -> None:
        self._of_each: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self._of_all: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()

    def note(self, function: Any, args: tuple[Any, ...], result: Any) -> None:
        """Remembers a result of a check, or of one over all values."""
        name = getattr(function, "__name__", "")
        if not isinstance(result, Tensor) or not args or not isinstance(args[0], Tensor):
            return
        if name in _CHECKS and args[0].is_floating_point():
            self._of_each[result] = _CHECKS[name]
        elif name in _OF_ALL and not result.ndim and args[0] in self._of_each:
            if self._of_each[args[0]] is _OF_ALL[name]:
                self._of_all[result] = _OF_ALL[name]

    def usual(self, tensor: Tensor) -> bool | None:
        """Returns what a check over all values says where all are finite; None of other tensors."""
        return self._of_all[tensor] if tensor in self._of_all else None
