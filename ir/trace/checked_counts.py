"""Counts of what a mask picks, asked for in a check alone, without picking it.

Models of pictures and sound compare sizes before they put features in the place of tokens:
`torch_compilable_check(embeds[mask].numel() == features.numel())`. What `embeds[mask]` gives is as
large as values say, which no plan can have; how many values that are is a sum of the mask.
"""

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from types import FrameType
from typing import Any

import torch

from meshwright.ir.trace.explain import is_users

Tensor = torch.Tensor
_CHECKS = frozenset("torch_compilable_check _check _check_value _check_with".split())


@dataclass(frozen=True, slots=True)
class PickedCount:
    """Stands for what a mask picks of a tensor; knows nothing but how many values that are."""

    mask: Tensor
    each: int
    """Values of the tensor for each of the mask."""

    def numel(self) -> Tensor:
        """Counts them, as a tensor."""
        return self.mask.sum() * self.each


def picked_count(func: Any, args: tuple[Any, ...], frame: FrameType | None) -> PickedCount | None:
    """Returns what stands for the result of a call, if it picks by a mask and a check counts it."""
    if getattr(func, "__name__", "") != "__getitem__" or len(args) < 2:
        return None
    tensor, mask = args[:2]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim > tensor.ndim:
        return None
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    if frame is None or frame.f_lineno not in _counted(frame.f_code.co_filename):
        return None
    return PickedCount(mask, prod(tensor.shape[mask.ndim :]))


@cache
def _counted(file: str) -> frozenset[int]:
    """Lines of a file on which something is picked for a check to count, and nothing else is."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return frozenset()
    counted = {id(node): node for check in _checks(tree) for node in _counts(check)}
    lines = {line for node in counted.values() for line in _lines(node)}
    others = (x for x in ast.walk(tree) if isinstance(x, ast.Subscript) and id(x) not in counted)
    return frozenset(lines - {line for node in others for line in _lines(node)})


def _checks(tree: ast.Module) -> Iterator[ast.expr]:
    """Conditions that are checked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args:
            function = node.value.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if name in _CHECKS:
                yield node.value.args[0]


def _counts(condition: ast.expr) -> Iterator[ast.Subscript]:
    for node in ast.walk(condition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "numel" and isinstance(node.func.value, ast.Subscript):
                yield node.func.value


def _lines(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
