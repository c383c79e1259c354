"""A model without parts is cut into shards of about equal parameters that form a chain."""

import torch
from torch import nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.verify import verify
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.equality import check_equal
from meshwright.testing.models import ModelCase
from tests.planner.problems import cluster, problem


class Flat(nn.Module):
    """All weights in one module; with `skip`, the input of the first is read again by the last."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(12))
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = None
        for weight in self.weights:
            x = torch.tanh(x @ weight)
            first = x if first is None else first
        return x + first if self.skip and first is not None else x


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 8), torch.zeros(4, 8)


def test_shards_are_balanced_and_plans_cut_there() -> None:
    graph = trace(Flat(skip=False), example(), squared)
    sizes = [sum(graph.tensors[n].numel for n in block.params) for block in graph.blocks]
    assert len(sizes) >= 4 and max(sizes) <= 2 * 64
    pins = ("pp=2", "recompute=none", "schedule=one_f_one_b", "num_microbatches=2")
    asked = problem(graph, cluster(2), constraints=pins)
    plan = search_problem(asked)
    assert len(plan.stages) >= 2 and verify(plan, graph, asked.cluster) == ()


def test_shards_between_a_skip_are_joined() -> None:
    graph = trace(Flat(skip=True), example(), squared)
    assert len(graph.blocks) == 2


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(size, 8, generator=generator) for _ in range(2))  # type: ignore[return-value]


def test_a_pipeline_of_shards_equals_one_process() -> None:
    case = ModelCase("flat", lambda: Flat(skip=False), batch, squared)
    graph = trace(case.model(), case.example(8), squared)
    asked = make_problem(graph, Cluster.local(2), precision="fp64", optimizer="adam")
    choice = uniform_choice(asked, pp=2, num_microbatches=2, recompute="full")
    found = check_equal(case, build_plan(asked, choice, predict=False), graph)
    assert found.worst_of_both <= 1e-9
