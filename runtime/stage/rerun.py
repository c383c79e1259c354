"""Runs some nodes of a block again and finds what the backward needs of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.node import map_arg

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.torch_private import leaves


def invoke(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The call that a node stands for."""
    args = map_arg(node.args, values.__getitem__)
    named = map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        assert isinstance(node.target, str)
        return getattr(args[0], node.target)(*args[1:], **named)
    assert callable(node.target)
    return node.target(*args, **named)


Wanted = tuple[fx.Node, int, int]
"""A node with the number of one of its results, or with -1 and the place of another tensor among
those that autograd asks it to keep."""


@dataclass(eq=False)
class Rerun:
    """The nodes that run again."""

    block: str
    nodes: Sequence[fx.Node]
    """In order."""
    differs: Mapping[fx.Node, bool]
    """Whether a node's result had a gradient."""
    wanted: frozenset[Wanted]
    _tensors: dict[Wanted, Tensor] = field(default_factory=dict)

    def run(self, held: Mapping[fx.Node, Any]) -> dict[Wanted, Tensor]:
        """`held`: what the nodes read of others."""
        values = dict(held)
        last = {used: node for node in self.nodes for used in node.all_input_nodes}
        for node in self.nodes:
            places = {place for n, result, place in self.wanted if n is node and result < 0}
            values[node] = self._call(node, values, places)
            for i, x in enumerate(x for x in leaves(values[node]) if isinstance(x, Tensor)):
                if (node, i, 0) in self.wanted:
                    self._tensors[node, i, 0] = x.detach()
            for used in [used for used in node.all_input_nodes if last[used] is node]:
                del values[used]
        found, self._tensors = self._tensors, {}
        return found

    def _call(self, node: fx.Node, values: Mapping[fx.Node, Any], places: set[int]) -> Any:
        if not places:
            with torch.no_grad():
                return invoke(node, values)
        given = {used: self._leaf(used, values[used]) for used in node.all_input_nodes}
        seen = 0

        def pack(x: Tensor) -> None:
            nonlocal seen
            if seen in places:
                self._tensors[node, -1, seen] = x.detach()
            seen += 1

        with torch.enable_grad(), saved_tensors_hooks(pack, _never):
            result = invoke(node, given)
        if seen <= max(places):
            raise MeshwrightError(
                f"{self.block}: {node.meta['key']} kept {seen} tensors when it ran again and more "
                "before; a plan cannot recompute it alone: keep it, or recompute the whole block"
            )
        return _mapped(result, Tensor.detach)

    def _leaf(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().requires_grad_(self.differs[node])


def _never(kept: Any) -> Tensor:
    raise AssertionError("nothing runs backward here")


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return tuple(_mapped(x, change) for x in value) if isinstance(value, tuple | list) else value
