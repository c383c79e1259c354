"""Annotations become constraints on parameters, meshes and stages."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.hints import Hint
from meshwright.ir.trace.trace import trace
from meshwright.planner.pins.hints import hint_constraints
from tests.planner.problems import cluster, problem, traced


class Layers(nn.Module):
    """Equal layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


@cache
def graph() -> Graph:
    return trace(Layers(), {"x": torch.zeros(4, 8)})


def asked(*hints: Hint) -> set[str]:
    return {str(item) for item in hint_constraints(replace(graph(), hints=hints))}


def test_no_hints_ask_nothing() -> None:
    assert hint_constraints(graph()) == ()


def test_replicated_parameters_are_whole_and_weights_are_split() -> None:
    found = asked(Hint("replicate", "layers"), Hint("split", "head"))
    assert found == {
        "place layers.*.*.bias model=R", "place layers.*.*.weight model=R",
        "place head.weight model=S",
    }  # fmt: skip


def test_patterns_name_nothing_else() -> None:
    found = asked(Hint("replicate", "layers.1"))
    assert found == {
        f"place layers.1.{i}.{name} model=R" for i in (0, 2) for name in ("weight", "bias")
    }


def test_sizes_are_pinned_where_the_blocks_run() -> None:
    found = asked(Hint("replicate", "layers", 2), Hint("split", "head", 4))
    assert {text for text in found if text.startswith("block")} == {
        "block layers.* dp=2", "block head model=4",
    }  # fmt: skip
    some = asked(Hint("split", "layers.0", 2), Hint("split", "layers.1", 2))
    assert {text for text in some if text.startswith("block")} == {
        "block layers.0 model=2", "block layers.1 model=2",
    }  # fmt: skip


def test_stages() -> None:
    found = asked(Hint("stage", "layers", 0), Hint("stage", "head", 1))
    assert found == {"block layers.* on stage 0", "block head on stage 1"}


def test_one_block_cannot_follow_two_sizes() -> None:
    name = graph().blocks[0].name
    with pytest.raises(PlanError, match=f"meet in block {name}, which is planned as one"):
        asked(Hint("stage", f"{name}.0", 0), Hint("stage", f"{name}.2", 1))
    with pytest.raises(PlanError, match="give both the same size"):
        asked(Hint("split", f"{name}.0", 2), Hint("split", f"{name}.2", 4))


def test_they_are_constraints_of_the_problem() -> None:
    hinted = replace(graph(), hints=(Hint("split", "head", 2),))
    found = problem(hinted, cluster(2), constraints=("pp=1",))
    texts = [str(item) for item in found.constraints]
    assert "pp=1" in texts and "place head.weight model=S" in texts


def test_tied_parameters_follow_a_hint_on_any_name() -> None:
    gpt2 = traced("gpt2")
    first, second = gpt2.tied[0]
    hinted = replace(gpt2, hints=(Hint("split", second.rpartition(".")[0]),))
    assert {str(item) for item in hint_constraints(hinted)} == {f"place {second} model=S"}
    clash = (Hint("split", first), Hint("replicate", second))
    with pytest.raises(PlanError, match="must agree"):
        problem(replace(gpt2, hints=clash), cluster(2))
