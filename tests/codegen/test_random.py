"""Random ops without a form of their own: ranks that hold the same draw the same."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.codegen.comm import Comm
from meshwright.codegen.local import evaluate, form_of
from meshwright.codegen.simulated import simulate
from meshwright.codegen.site import Site
from meshwright.ir.layout import Axis
from meshwright.ir.trace import trace


class Noisy(nn.Module):
    def __init__(self, draw) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"loss": (y * self.draw(y.detach())).sum()}


DRAWS = {
    "rand_like": torch.rand_like,
    "bernoulli": lambda y: torch.bernoulli(y.sigmoid()),
    "exponential": lambda y: torch.empty_like(y).exponential_(),
    "normal": lambda y: torch.empty_like(y).normal_(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_ranks_that_hold_the_same_draw_the_same(name: str) -> None:
    graph = trace(Noisy(DRAWS[name]), {"x": torch.randn(2, 4)})
    op = next(op for op in graph.ops if name in op.target)
    inputs = [torch.full((2, 4), 0.5) for _ in op.inputs]

    def body(comm: Comm) -> Tensor:
        site = Site(op, graph.tensors, {}, {"tp": Axis(2)}, comm.coordinates)
        return evaluate(form_of(site), comm, inputs)[0]

    first, second = simulate({"tp": 2}, body)
    assert torch.equal(first, second)
    assert first.unique().numel() > 1
