"""Models without repeated parts, cut into shards, run under pipelines of uneven stages."""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equality import check_equal
from meshwright.testing.models import Batch, ModelCase

BATCH, STEPS, WIDTH = 12, 3, 6


class Tapering(nn.Module):
    """One module holds all weights, no two of one shape: nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, 20, 17, 14, 11, 9, 8, 7, 5]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(n, m) / n**0.5) for n, m in pairwise(widths)
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(m)) for m in widths[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = torch.tanh(x @ weight + bias)
        return x


class Joined(nn.Module):
    """Short skips, of different kinds, inside what has to stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3.0) for _ in range(10))
        self.first = nn.Parameter(torch.randn(WIDTH, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.first
        functions = (torch.tanh, F.gelu, torch.sigmoid, F.silu, F.softplus)
        for function, left, right in zip(
            functions, self.weights[:5], self.weights[5:], strict=True
        ):
            x = x + function(x @ left) @ right
        return x[:, :5]


def _batch(size: int, generator: torch.Generator) -> Batch:
    return tuple(torch.randn(size, n, generator=generator) for n in (WIDTH, 5))


def _squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


CASES = {
    "tapering": ModelCase("tapering", Tapering, _batch, _squared),
    "joined": ModelCase("joined", Joined, _batch, _squared),
}


@cache
def traced(name: str) -> Graph:
    case = CASES[name]
    return trace(case.model(), case.example(BATCH), _squared)


@dataclass(frozen=True)
class Pipeline:
    """What is asked of `uniform_choice`, on `world` ranks."""

    world: int
    choice: dict[str, Any] = field(default_factory=dict)


PIPELINES = {
    "one_shard_first": Pipeline(2, {"pp": 2, "cuts": (1,), "num_microbatches": 4}),
    "one_shard_last": Pipeline(2, {"pp": 2, "cuts": (-1,), "num_microbatches": 2,
                                   "schedule": "zero_bubble"}),
    "three_uneven": Pipeline(3, {"pp": 3, "cuts": (1, 3), "num_microbatches": 3}),
    "replicas_2_1": Pipeline(3, {"pp": 2, "cuts": (2,), "stage_dp": (2, 1),
                                 "num_microbatches": 3, "recompute": "full"}),
}  # fmt: skip


@pytest.mark.parametrize("model", CASES)
def test_the_model_is_a_chain_of_shards(model: str) -> None:
    blocks = traced(model).blocks
    assert len(blocks) >= 4 and len({block.pattern for block in blocks}) >= 4


@pytest.mark.sampled
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("model", CASES)
def test_an_uneven_pipeline_of_shards_equals_one_process(model: str, pipeline: str) -> None:
    graph, kind = traced(model), PIPELINES[pipeline]
    count = len(graph.blocks)
    asked = kind.choice | {"cuts": tuple(cut % count for cut in kind.choice["cuts"])}
    problem = make_problem(graph, Cluster.local(kind.world), precision="fp64", optimizer="adam")
    plan = build_plan(problem, uniform_choice(problem, **asked), predict=False)
    names = [block.name for block in graph.blocks]
    sizes = [names.index(s.last) - names.index(s.first) + 1 for s in plan.stages]
    assert sum(sizes) == count and len(set(sizes)) > 1
    found = check_equal(CASES[model], plan, graph, steps=STEPS)
    assert found.loss <= 1e-9 and found.parameters <= 1e-9, str(found)
