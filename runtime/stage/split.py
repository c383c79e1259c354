"""Splits a block's backward: gradients of its inputs now, gradients of its parameters later.

The input half runs autograd only along paths that lead to the block's inputs, and keeps the
gradients that arrive at the nodes where a parameter joins such a path (a matrix product, say). The
weight half starts from those nodes, so nothing is computed twice. A parameter that joins at several
places cannot be cut out that way (one place may lie behind another); it gets a plain backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


@dataclass(eq=False)
class WeightWork:
    """What is left to do for the parameters of one block and micro-batch."""

    edges: list[GradientEdge]
    gradients: list[Tensor]
    joins: list[tuple[Node, list[Tensor]]] = field(default_factory=list)
    """A node, and the parameters that join the input paths there only."""
    arrived: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)
    rest: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Adds the gradients to the parameters'."""
        if self.rest:
            torch.autograd.backward(
                self.edges, self.gradients, retain_graph=bool(self.joins), inputs=self.rest
            )
        for node, parameters in self.joins:
            found = self.arrived.get(node, ())
            roots = [(GradientEdge(node, i), g) for i, g in enumerate(found) if g is not None]
            if roots:
                edges, gradients = zip(*roots, strict=True)
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=parameters)
        self.joins, self.arrived, self.edges = [], {}, []


def backward_input(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> WeightWork:
    """Adds the gradients of `inputs` to theirs; what is returned does the parameters'."""
    work = WeightWork(list(edges), list(gradients))
    input_nodes = {_accumulator(x): x for x in inputs}
    parameter_nodes = {_accumulator(p): p for p in parameters}
    reached = _reached([edge.node for edge in edges], input_nodes, parameter_nodes)
    _find_joins(work, reached, input_nodes, parameter_nodes)
    handles = [node.register_prehook(_keeper(work, node)) for node, _ in work.joins]
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(edges, gradients, strict=True)
        if reached[edge.node][0]
    ]
    if pairs:
        starts, arriving = zip(*pairs, strict=True)
        torch.autograd.backward(starts, arriving, retain_graph=True, inputs=list(inputs))
    for handle in handles:
        handle.remove()
    if not work.rest:  # the weight half starts at joins alone
        work.edges, work.gradients = [], []
    return work


def _keeper(work: WeightWork, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        work.arrived[node] = gradients

    return keep


def _accumulator(leaf: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(leaf).node


_Reached = dict[Node, tuple[frozenset[Node], frozenset[Node]]]
"""Per node: which inputs and which parameters its gradient leads to."""


def _reached(
    roots: list[Node], inputs: dict[Node, Tensor], parameters: dict[Node, Tensor]
) -> _Reached:
    """Walks the graph once, children before parents."""
    found: _Reached = {}
    stack = list(roots)
    while stack:
        node = stack[-1]
        children = [child for child, _ in node.next_functions if child is not None]
        missing = [child for child in children if child not in found]
        if missing and node not in found:
            stack.extend(missing)
            continue
        stack.pop()
        if node not in found:
            found[node] = (
                frozenset({node} & inputs.keys()).union(*(found[c][0] for c in children)),
                frozenset({node} & parameters.keys()).union(*(found[c][1] for c in children)),
            )
    return found


def _find_joins(
    work: WeightWork, reached: _Reached, inputs: dict[Node, Tensor], parameters: dict[Node, Tensor]
) -> None:
    """Sorts the parameters into those with a single join and the rest."""
    at: dict[Node, list[Node]] = {}
    for node, (to_inputs, _) in reached.items():
        if not to_inputs or node in inputs:
            continue
        for child, _ in node.next_functions:
            if child is not None and not reached[child][0]:
                for leaf in reached[child][1]:
                    at.setdefault(leaf, []).append(node)
    roots = {edge.node for edge in work.edges}
    behind_root = {
        p for root in roots if not reached[root][0] for p in reached[root][1]
    }  # fmt: skip
    joins: dict[Node, list[Tensor]] = {}
    for leaf, parameter in parameters.items():
        places = at.get(leaf, [])
        if len(set(places)) == 1 and leaf not in behind_root:
            joins.setdefault(places[0], []).append(parameter)
        elif places or leaf in behind_root:
            work.rest.append(parameter)
    work.joins = list(joins.items())
