"""Pipelines as deep as the model has blocks: the embedding and the loss are stages of their own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.published.cuts import equal, starts
from benchmarks.published.measured import RowError
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.equality import check_equal
from meshwright.testing.models import Batch, ModelCase
from tests.benchmarks.published_rows import GPT3, row

TOKENS, WIDTH, LAYERS = 11, 8, 2


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Small(nn.Module):
    """An embedding, two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(x))


def _batch(size: int, generator: torch.Generator) -> Batch:
    return tuple(torch.randint(0, TOKENS, (size, 3), generator=generator) for _ in range(2))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASE = ModelCase("small", Small, _batch, _loss)


def test_two_layers_on_four_stages_equal_one_process() -> None:
    graph = trace(CASE.model(), CASE.example(4), _loss)
    cluster = Cluster.local(4)
    pins = ("pp=4", "schedule=one_f_one_b", "num_microbatches=2", "recompute=none", "saved=none")
    problem = make_problem(graph, cluster, precision="fp64", optimizer="adam", constraints=pins)
    plan = search_problem(problem, "ilp")
    assert not plan.verify(graph, cluster) and plan.predicted and plan.predicted.step_s > 0
    assert [stage.first == stage.last for stage in plan.stages] == [True] * 4
    assert "embed" in plan.stages[0].last and "head" in plan.stages[-1].first
    found = check_equal(CASE, plan, graph, steps=2)
    assert found.loss <= 1e-9 and found.parameters <= 1e-9, str(found)


def deep(layers: int):  # type: ignore[no-untyped-def]
    return row(
        model=GPT3 | {"layers": layers}, parallel={"tp": 2, "pp": 32, "dp": 1},
        batch={"gbs": 64, "mbs": 1, "seq": 2048},
    )  # fmt: skip


@pytest.mark.parametrize("layers", [30, 31])
def test_published_rows_may_have_ends_of_their_own(layers: int) -> None:
    sizes = equal(deep(layers), 32)
    assert len(sizes) == 32 and sizes.count(1) == layers and not sizes[-1]
    begin = starts(sizes)
    assert len(begin) == 31 and begin[-1] == layers + 1
    assert begin[0] == (2 if layers == 31 else 1)


def test_fewer_layers_are_refused() -> None:
    with pytest.raises(RowError, match=r"29 layers, the embedding and the loss cannot .* is 31"):
        equal(deep(29), 32)
