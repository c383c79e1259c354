"""Buffers that forward assigns anew are written to."""

import torch
from torch import Tensor, nn

from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret


class Average(nn.Module):
    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.value = 0.5 * self.value + x.detach().mean(0)
        return x / self.value


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.average = nn.Linear(4, 4), Average()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.average(self.linear(x)).sum()}


def test_an_assigned_buffer_is_written_to() -> None:
    model, x = Model(), torch.rand(2, 4)
    graph = trace(model, {"x": x})
    assert torch.equal(model.average.value, torch.ones(4))
    found = interpret(graph, model, {"x": x})[graph.loss]
    written = model.average.value.clone()
    model.average.value = torch.ones(4)
    torch.testing.assert_close(found, model(x)["loss"])
    torch.testing.assert_close(written, model.average.value)
