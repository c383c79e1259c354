"""Which model meshes are tried at all."""

import pytest
import torch
from torch import nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.model_space import expert_forms, forms
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.search import search
from tests.planner.problems import TINY


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_models_without_experts_have_no_axis_for_them(make: type[Problem]) -> None:
    problem = make()
    assert not expert_forms(problem)
    assert not [mesh for mesh in forms(problem) if "ep" in dict(mesh)]


def test_one_axis_over_two_nodes_is_tried_unasked() -> None:
    """Few samples of wide layers, whose sums are less than what replicas would send."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))
    graph = trace(net, (torch.zeros(1024, 2048),), lambda out: out.square().mean())
    machine = Cluster.preset("a100-40", num_nodes=2, devices_per_node=4)
    free, *pinned = (
        search(graph, machine, constraints=pins, progress=False)
        for pins in ((), ("tp=8",), ("pp=1",))
    )
    assert free.stages[0].mesh["tp"] == 8
    assert all(free.predicted.step_s <= 1.0001 * other.predicted.step_s for other in pinned)
