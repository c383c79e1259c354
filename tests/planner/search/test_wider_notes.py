"""A model in wider numbers than a plan is priced in: the plan says so."""

import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(x).tanh()).square().mean()


def _notes(model: nn.Module, precision: str) -> list[str]:
    dtype = next(model.parameters()).dtype
    graph = trace(model, (torch.randn(4, 8, dtype=dtype),), precision=precision)
    problem = make_problem(graph, Cluster.local(1), precision=precision)
    found = search_problem(problem, time_limit_s=20).notes
    return [note for note in found if "a job leaves them so" in note]


def test_a_model_in_wider_numbers_than_the_plan_is_said_to_be_so() -> None:
    for precision in ("fp32", "tf32"):
        (note,) = _notes(_Small().double(), precision)
        assert "in float64" in note and "precision fp64 says" in note
    assert not _notes(_Small().double(), "fp64")
    assert not _notes(_Small(), "fp32")


def test_a_part_in_wider_numbers_is_priced_in_them() -> None:
    model = _Small()
    model.up.double()
    graph = trace(
        nn.Sequential(nn.Linear(8, 8), _Cast(), model.up, _Mean()), (torch.randn(4, 8),),
        precision="fp32",
    )  # fmt: skip
    problem = make_problem(graph, Cluster.local(1), precision="fp32")
    assert not [n for n in search_problem(problem, time_limit_s=20).notes if "leaves them so" in n]


class _Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
