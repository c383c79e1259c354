"""Blocks whose replicas have nothing to do with each other cost as much whatever their number."""

import pytest
import torch
from torch import nn

from meshwright.costmodel.block import block_costs
from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem


class _Net(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(("norm", "apart"), [(nn.LayerNorm(32), True), (nn.BatchNorm1d(32), False)])
def test_one_walk_is_for_all_numbers_of_replicas(
    norm: nn.Module, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster.preset("a100-80", num_nodes=1, devices_per_node=8)
    graph = trace(_Net(norm), {"x": torch.zeros(16, 16)})
    problem = make_problem(graph, cluster, precision="fp32")
    walked, walk, again, repriced = [], block_costs.walk_block, Walk.again, []

    def counted(*args: object) -> object:
        walked.append(1)
        return walk(*args)  # type: ignore[arg-type]

    def counted_again(*args: object) -> Walk:
        repriced.append(1)
        return again(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(block_costs, "walk_block", counted)
    monkeypatch.setattr(Walk, "again", counted_again)
    layouts = {layout.pattern: layout for layout in problem.layouts((), "")}
    levels = (Level(8, cluster.nodes[0].link),)
    alone = BlockSpot(2, 1, (), "a100-80", (), ())
    many = BlockSpot(2, 8, (), "a100-80", levels, ())
    blocks, costs = list(graph.distinct_blocks()), problem.tables.blocks
    pairs = [[costs.cost(b, layouts[b.pattern], s) for s in (alone, many)] for b in blocks]
    found = [costs.is_apart(b, layouts[b.pattern], many) for b in blocks]
    assert all(found) is apart
    for is_apart, (one, eight) in zip(found, pairs, strict=True):
        assert (one is eight) is is_apart, "the same whatever their number, or not"
        assert (eight.comm_forward_s > one.comm_forward_s) is not is_apart
    assert len(walked) == len(blocks) + found.count(False)
    assert len(repriced) == found.count(False), "whoever asks first prices it once"
