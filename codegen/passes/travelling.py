"""Layers of experts to which tokens travel, step by step in the graph of a block, so that each
message is a conversion like any other: something can go on beside it."""

from operator import getitem
from typing import Any, cast

from torch import fx
from torch.fx.node import Argument

from meshwright.codegen.collectives.line import TRAVEL, Narrow
from meshwright.codegen.sharded.routing import (
    Route,
    experts_here,
    find_route,
    is_narrow,
    routed_experts,
    rows_home,
    rows_out,
)


def step_by_step(module: fx.GraphModule) -> int:
    """Puts what `routed_experts` calls in the place of each call of it; how many were found."""
    calls = [n for n in module.graph.nodes if n.target is routed_experts]
    for call in calls:
        comm, *tokens = call.args
        given = dict(call.kwargs)
        if not tokens:
            tokens = [given.pop(name) for name in ("hidden", "top_k_index", "top_k_weights")]
        axes = [(given.pop("axis"), given.pop("experts")), *given.pop("inside", ())]
        with module.graph.inserting_before(call):
            made = _Steps(module.graph, comm, call).experts(tokens, axes, given)
        call.replace_all_uses_with(made)
        module.graph.erase_node(call)
    if calls:
        module.graph.lint()
        module.recompile()
    return len(calls)


class _Steps:
    """Adds nodes in the place of one call."""

    def __init__(self, graph: fx.Graph, comm: fx.Node, call: fx.Node) -> None:
        self._graph, self._comm, self._call = graph, comm, call

    def experts(self, tokens: list[Any], axes: list[Any], given: dict[str, Any]) -> fx.Node:
        """Sends tokens, indices and weights over the first axis, and on along the others."""
        hidden, index, weights = tokens
        if not axes:
            return self._made(experts_here, (self._comm, *tokens), given)
        (axis, experts), *inside = axes
        found = self._made(find_route, (self._comm, index), {"axis": axis, "experts": experts})
        picked, of, places, out, home = (
            self._part(found, number, name) for number, name in enumerate(Route._fields)
        )
        rows, scales = (
            self._made(rows_out, (self._comm, x, of, places), {}) for x in (hidden, weights)
        )
        narrow = is_narrow(given.get("form"))
        come = [
            self._sent(rows, axis, out, "tokens to their experts", narrow="rows" if narrow else ""),
            self._sent(picked, axis, out, "what they picked", backward="none"),
            self._sent(scales, axis, out, "weights of these"),
        ]
        made = self._sent(
            self.experts(come, inside, given), axis, home, "tokens come home",
            narrow="gradients" if narrow else "",
        )  # fmt: skip
        return self._made(rows_home, (self._comm, made, of, places), {})

    def _made(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return self._like(
            self._graph.create_node(
                "call_function", target, args, cast(dict[str, Argument], kwargs)
            )
        )

    def _part(self, found: fx.Node, number: int, name: str) -> fx.Node:
        return self._like(
            self._graph.create_node("call_function", getitem, (found, number), name=name)
        )

    def _sent(
        self, rows: fx.Node, axis: str, counts: fx.Node, says: str, backward: str = TRAVEL,
        narrow: Narrow = "",
    ) -> fx.Node:  # fmt: skip
        more: dict[str, Argument] = {"backward": backward}
        if narrow:
            more["narrow"] = narrow
        node = self._graph.create_node(
            "call_method", TRAVEL, (self._comm, rows, axis, counts), more
        )
        node.meta["comment"] = f"{says}, over {axis}"
        return self._like(node)

    def _like(self, node: fx.Node) -> fx.Node:
        node.meta = dict(self._call.meta) | node.meta
        return node
