"""Whole numbers that a loop's lines compute of its number, and which parts of tensors they name."""

import ast
from collections.abc import Callable, Iterable
from functools import reduce
from operator import add, floordiv, mod, mul, neg, pos, sub
from typing import Any

from torch import Tensor, nn

from meshwright.ir.trace.loops import SeenLoop

Each = tuple[int, ...]
"""One number per round."""
_OF_TWO: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv, ast.Mod: mod,
}  # fmt: skip
_OF_ONE: dict[type[ast.unaryop], Callable[[int], int]] = {ast.USub: neg, ast.UAdd: pos}
_OF_SEVERAL: dict[str, Callable[[int, int], int]] = {"min": min, "max": max}


class LoopNumbers:
    """What the first `rounds` rounds of a loop know as whole numbers, by name."""

    def __init__(self, loop: SeenLoop, number: str, rounds: int) -> None:
        self._loop, self._rounds = loop, rounds
        self.named: dict[str, Each] = {number: tuple(loop.over[:rounds])}

    def of(self, node: ast.expr, assigned: Iterable[str]) -> Each | None:
        """Returns what an expression is in each round; None if it is made of more than whole
        numbers, or of what lines of the loop assign and is none."""
        if isinstance(node, ast.BinOp) and type(node.op) in _OF_TWO:
            return self._all(_OF_TWO[type(node.op)], [node.left, node.right], assigned)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OF_ONE:
            return self._all(_OF_ONE[type(node.op)], [node.operand], assigned)
        if isinstance(node, ast.Call):
            return self._of_call(node, assigned)
        if isinstance(node, ast.Name) and node.id in self.named:
            return self.named[node.id]
        value = node.value if isinstance(node, ast.Constant) else self._outside(node, assigned)
        return (value,) * self._rounds if type(value) is int else None

    def constant(self, node: ast.expr, assigned: Iterable[str]) -> int | None:
        """Returns what an expression is if that is one whole number in all rounds."""
        found = self.of(node, assigned)
        return found[0] if found and len({*found}) == 1 else None

    def width(self, index: ast.expr, assigned: Iterable[str]) -> int | None:
        """Returns how many places wide round i's part is, where an index takes the i-th of parts
        that lie side by side; 0 where it takes place i, whose dim goes; None of other indices."""
        if not isinstance(index, ast.Slice):
            return 0 if self.of(index, assigned) == tuple(range(self._rounds)) else None
        if index.step or not index.lower or not index.upper:
            return None
        first, end = self.of(index.lower, assigned), self.of(index.upper, assigned)
        if not first or not end or end[0] < 1:
            return None
        places = tuple(range(0, (self._rounds + 1) * end[0], end[0]))
        return end[0] if (first, end) == (places[:-1], places[1:]) else None

    def _all(
        self, compute: Callable[..., int], nodes: list[ast.expr], assigned: Iterable[str]
    ) -> Each | None:
        found = [each for node in nodes if (each := self.of(node, assigned))]
        if len(found) < len(nodes):
            return None
        try:
            return tuple(map(compute, *found))
        except ZeroDivisionError:  # the loop raises it again
            return None

    def _of_call(self, node: ast.Call, assigned: Iterable[str]) -> Each | None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        own = name in self._loop.values or name in self._loop.names
        if name not in _OF_SEVERAL or own or node.keywords or len(node.args) < 2:
            return None
        compute = _OF_SEVERAL[name]
        return self._all(lambda *given: reduce(compute, given), node.args, assigned)

    def _outside(self, node: ast.expr, assigned: Iterable[str]) -> Any:
        if isinstance(node, ast.Attribute):
            return attribute_of_module(node, self._loop, assigned)
        if isinstance(node, ast.Name) and node.id not in assigned:
            return self._loop.values.get(node.id, self._loop.names.get(node.id))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            of = node.value
            dim = self.constant(node.slice, assigned)
            whole = self._outside(of.value, assigned) if isinstance(of.value, ast.Name) else None
            if of.attr == "shape" and isinstance(whole, Tensor) and dim is not None:
                return whole.shape[dim] if -whole.ndim <= dim < whole.ndim else None
        return None


def attribute_of_module(node: ast.Attribute, loop: SeenLoop, assigned: Iterable[str]) -> Any:
    """Returns what `self.name` holds, of a module that the loop does not assign; None if it holds
    nothing of that name: code that runs when it is asked for may do more than tell."""
    if not isinstance(node.value, ast.Name) or node.value.id in assigned:
        return None
    holder = loop.values.get(node.value.id)
    if not isinstance(holder, nn.Module) or hasattr(type(holder), node.attr):
        return None
    held = {**holder._parameters, **holder._buffers, **vars(holder)}
    return getattr(holder, node.attr) if node.attr in held else None
