"""Custom autograd.Functions stay whole in a trace, with the backward that they define."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret


class Reverse(Function):
    """Hands its input on, and the gradient back with another sign and size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


class Pair(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.round(), x.abs()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return 2 * first + 3 * second


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = Reverse.apply(self.linear(x), 0.5)
        left, right = Pair.apply(Reverse.apply(y, 2.0))
        return {"loss": (left * x + right).sum()}


def traced(model: nn.Module) -> Graph:
    return trace(model, {"x": torch.randn(2, 4)})


def test_each_call_is_one_operator() -> None:
    targets = [op.target for op in traced(Model()).ops if "function" in op.target]
    assert len(targets) == 3 and len(set(targets)) == 3  # the factors differ
    assert all(
        target.startswith("meshwright_function.tests_ir_trace_test_functions") for target in targets
    )
    assert targets == [op.target for op in traced(Model()).ops if "function" in op.target]


def test_the_gradient_is_that_of_the_function() -> None:
    model = Model()
    x = torch.randn(2, 4)
    graph = traced(model)
    model(x)["loss"].backward()
    wanted = model.linear.weight.grad
    assert wanted is not None
    model.zero_grad()
    interpret(graph, model, {"x": x})[graph.loss].backward()
    torch.testing.assert_close(model.linear.weight.grad, wanted)


def test_functions_are_as_they_were_afterwards() -> None:
    before = Function.__dict__["apply"]
    traced(Model())
    assert Function.__dict__["apply"] is before


class Hidden(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": Hidden.apply(x, self.linear).sum()}


def test_a_module_inside_a_function_is_refused() -> None:
    with pytest.raises(
        TraceError, match="Hidden is given a Linear, whose tensors a plan cannot see"
    ):
        traced(Hiding())
