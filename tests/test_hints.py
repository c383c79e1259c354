"""From `with mw.replicate()` and `with mw.split()` to plans that obey, run on two ranks."""

from functools import cache

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.layout import Replicate, Shard, parse_placement
from meshwright.ir.plan.plan import Plan, param_key
from meshwright.planner.pins.constraints import broken
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.equality import check_equal
from meshwright.testing.models import Batch, ModelCase
from tests.traces import zoo_graph


class Classifier(nn.Module):
    """Whale's first example: a backbone that is replicated, and a head of many classes, split."""

    def __init__(self) -> None:
        super().__init__()
        with mw.replicate():
            self.backbone = nn.Sequential(
                nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
            )
        with mw.split():
            self.head = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


class Staged(nn.Module):
    """Annotated where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with mw.stage(0):
            x = self.body(x)
        with mw.stage(1), mw.replicate(1):
            return self.head(x)  # type: ignore[no-any-return]


def batch(size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randn(size, 16, generator=generator),
        torch.randint(96, (size,), generator=generator),
    )


CASES = {
    name: ModelCase(name=name, build=build, batch=batch, loss_fn=nn.functional.cross_entropy)
    for name, build in (("classifier", Classifier), ("staged", Staged))
}


@cache
def traced(name: str) -> Graph:
    case = CASES[name]
    return zoo_graph(case)


def searched(name: str, *constraints: str, devices: int = 2) -> Plan:
    problem = make_problem(
        traced(name), mw.Cluster.local(devices), precision="fp64", optimizer="adam",
        constraints=constraints,
    )  # fmt: skip
    plan = search_problem(problem)
    assert not broken(problem.constraints, plan, problem.graph)
    return plan


def placements(plan: Plan, graph: Graph, fqn: str) -> set[str]:
    """Where a parameter lies on the model axes, over all stages that have it."""
    found = set()
    for index, stage in enumerate(plan.stages):
        for block in plan.stage_blocks(graph, index):
            for tensor in (graph.tensors[name] for name in block.params):
                if tensor.fqn == fqn:
                    stored = plan.layout(stage.layouts[block.pattern]).parameters
                    placed = stored.get(param_key(block, fqn), {})
                    found |= {placed.get(axis, "R") for axis, _ in stage.model}
    return found


def test_a_plan_obeys_and_trains_as_one_process() -> None:
    graph, plan = traced("classifier"), searched("classifier")
    (head,) = placements(plan, graph, "head.weight")
    assert isinstance(parse_placement(head), Shard)
    for name in (t.fqn for t in graph.parameters if t.fqn.startswith("backbone")):
        assert all(isinstance(parse_placement(p), Replicate) for p in placements(plan, graph, name))
    assert "place head.weight model=S" in plan.constraints
    difference = check_equal(CASES["classifier"], plan, graph, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_stages_are_as_hinted() -> None:
    graph, plan = traced("staged"), searched("staged")
    names = [[b.name for b in plan.stage_blocks(graph, i)] for i in range(len(plan.stages))]
    assert len(names) == 2 and all("body" in name for name in names[0]) and "head" in names[1][0]
    difference = check_equal(CASES["staged"], plan, graph, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_hints_and_pins_that_contradict_are_named() -> None:
    with pytest.raises(Infeasible, match=r"place head.weight model=S"):
        searched("classifier", "tp=1", "pp=1")
