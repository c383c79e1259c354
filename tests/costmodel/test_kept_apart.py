"""Memory of operands that an op fetches from other ranks and keeps."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.costmodel.block.price_ops import GraphFacts, StageSite, Walk
from meshwright.costmodel.comm.comm import group_levels
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.layout.layout import Axis, parse_strategy
from meshwright.ir.precision import precision
from meshwright.ir.trace.trace import trace

CLUSTER = Cluster.preset("a100-80")


def traced() -> tuple[Graph, Op, Op]:
    """A graph with its rectifier and the convolution behind it."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten()
    )
    batch: tuple[Tensor, Tensor] = torch.zeros(2, 3, 8, 6), torch.zeros(2, dtype=torch.int64)
    graph = trace(model, batch, functional.cross_entropy)
    relu = next(op for op in graph.ops if "relu" in op.target)
    return graph, relu, next(op for op in graph.ops if relu.outputs[0] in op.inputs)


def saved_bytes(ranks: int) -> int:
    """What the two keep where the height is split."""
    graph, relu, conv = traced()
    axes = {"dp": Axis(1), "cp": Axis(ranks)}
    levels = {axis: group_levels(range(line.size), CLUSTER) for axis, line in axes.items()}
    site = StageSite(axes, dict.fromkeys(axes, 0), CLUSTER.device(0), levels)
    walk = Walk(GraphFacts.of(graph, precision("fp32"), "cpu"), site, None)
    for op, text in ((relu, "S(2) -> S(2)"), (conv, "S(2) R|P R|P -> S(2)")):
        walk.op(op, {"cp": parse_strategy(text)})
    return sum(walk.saved.values())


def test_a_convolution_keeps_its_part_with_the_halo() -> None:
    row = 2 * 4 * 6 * 4
    assert saved_bytes(1) == 8 * row, "the rectifier's result is kept once, for both"
    assert saved_bytes(2) == 4 * row + 6 * row
