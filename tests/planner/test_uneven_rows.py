"""A plan says which weights make products slow because their rows are not aligned."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.notes import notes_of
from meshwright.planner.search.search import search_problem


class Words(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.lm_head(self.embed(x))).sum()


def said(
    vocab: int, hidden: int = 64, device: str = "h100-sxm", precision: str = "bf16-autocast"
) -> list[str]:
    graph = trace(Words(vocab, hidden), (torch.zeros(4, 8, dtype=torch.int64),))
    machine = Cluster.preset(device, devices_per_node=1)
    problem = make_problem(graph, machine, precision=precision)
    plan = search_problem(problem, "ilp")
    return [note for note in notes_of(problem, plan) if "rows of its" in note]


def test_an_odd_vocabulary_and_the_next_that_would_do() -> None:
    (note,) = said(1009)
    assert note.startswith("lm_head.weight has a dim of 1009 values")
    assert "115 TFLOP/s on h100-sxm; 1024 values" in note


@pytest.mark.parametrize(("vocab", "rate"), [(1010, "150"), (1012, "150")])
def test_even_is_not_enough(vocab: int, rate: str) -> None:
    (note,) = said(vocab)
    assert f"reach {rate} TFLOP/s" in note


@pytest.mark.parametrize(
    "asked",
    [
        {"vocab": 1008},
        {"vocab": 1009, "precision": "fp32"},
        {"vocab": 1009, "device": "v100-16"},  # not known there
    ],
)
def test_nothing_is_said_where_nothing_is_known_or_lost(asked: dict[str, object]) -> None:
    assert not said(**asked)  # type: ignore[arg-type]


def test_small_products_are_not_worth_a_note() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(1024, 1024)
            self.score = nn.Linear(1024, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.score(self.body(x)).sum()

    graph = trace(Classes(), (torch.zeros(16, 1024),))
    problem = make_problem(
        graph, Cluster.preset("h100-sxm", devices_per_node=1), precision="bf16-autocast"
    )
    assert not [n for n in notes_of(problem, search_problem(problem, "ilp")) if "rows of its" in n]
