"""Graphs whose layers of experts are told where their tokens go."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.ir.graph.expert_form import form_of
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.routing import Routing, spread_evenly


def with_routing(graph: Graph, known: Sequence[Routing] = ()) -> Graph:
    """Returns the graph whose layers of experts route as `known` says of layers that have as many
    experts and pick as many, others evenly; the same graph where that changes nothing. Layers alike
    are told alike, so that equal blocks stay equal."""
    if EXPERTS_TARGET not in graph.targets:
        return graph
    told = {(one.experts, one.picked, one.weightless): one for one in known}
    ops = tuple(
        replace(op, routing=told.get(size) or spread_evenly(*size))
        if (size := expert_sizes(op, graph)) else op for op in graph.ops
    )  # fmt: skip
    return graph if ops == graph.ops else replace(graph, ops=ops)


def evenly_routed(op: Op, graph: Graph) -> Routing:
    """Returns the routing of a layer of experts of which nothing is known."""
    size = expert_sizes(op, graph)
    assert size
    return spread_evenly(*size)


def expert_sizes(op: Op, graph: Graph) -> tuple[int, int, int] | None:
    """Returns how many experts a layer has, how many each token picks, and how many of these may be
    others without weights; None for other ops."""
    if op.target != EXPERTS_TARGET:
        return None
    shapes = [graph.tensors[op.inputs[i]].shape for i in (3, 1)]
    return shapes[0][0], shapes[1][-1], form_of(op).weightless
