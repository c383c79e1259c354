"""A plan that is run with another model says so in one sentence, whatever that model raises."""

import pytest
import torch
from torch import nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MismatchError
from meshwright.planner.search.search import search
from meshwright.runtime.job.compile import compile as compile_job


class Squares(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


class Words(Squares):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


def test_another_model_is_named_with_what_it_lacks() -> None:
    example = {"x": torch.zeros(4, 4)}
    plan = search(Squares(), Cluster.local(1), example_inputs=example, progress=False)
    with pytest.raises(
        MismatchError, match=r"'Squares' of 5 parameters, this is a 'Words' of 5,.*\(x\)"
    ):
        compile_job(Words(), plan)
    # What the plan's own model raises is for its user to see.
    broken = Squares()
    broken.linear = None
    with pytest.raises(Exception) as caught:
        compile_job(broken, plan)
    assert not isinstance(caught.value, MismatchError)
