"""Custom autograd.Functions stay whole in a trace, with the backward that they define."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshwright.costmodel.ops.op_classes import class_of
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import TraceError
from meshwright.ir.graph.dtypes import runtime_dtypes
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.precision import precision
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


class Adapted(Function):
    """A product with a low-rank one beside it, as adapters write it by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, down, up)
        return x @ weight + x @ down @ up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, down, up = ctx.saved_tensors
        inner = x @ down
        return (
            grad @ weight.mT + grad @ up.mT @ down.mT, x.mT @ grad,
            x.mT @ (grad @ up.mT), inner.mT @ grad,
        )  # fmt: skip


class Plain(nn.Module):
    """What `Adapted` does."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((64, 96), (64, 8), (8, 96))
        self.weight, self.down, self.up = (nn.Parameter(torch.randn(*size)) for size in sizes)

    def inner(self, x: Tensor) -> Tensor:
        return x @ self.weight + x @ self.down @ self.up

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(x).square().sum()}


class ByHand(Plain):
    def inner(self, x: Tensor) -> Tensor:
        return Adapted.apply(x, self.weight, self.down, self.up)  # type: ignore[no-any-return]


def test_products_inside_of_functions_are_counted_and_priced_as_products() -> None:
    x = torch.randn(32, 64)
    graphs = [trace(made(), {"x": x}) for made in (Plain, ByHand)]
    flops = [sum(op.flops for op in graph.ops if is_product(op)) for graph in graphs]
    assert flops == [2 * 32 * (64 * 96 + 64 * 8 + 8 * 96)] * 2
    assert sum(map(is_product, graphs[1].ops)) == 1


def is_product(op: Op) -> bool:
    return class_of(op) is OpClass.MATMUL


def test_results_of_products_inside_are_in_the_dtype_of_autocast() -> None:
    x, model = torch.randn(32, 64), ByHand()
    graph = trace(model, {"x": x})
    (made,) = next(op for op in graph.ops if is_product(op)).outputs
    with torch.autocast("cpu", torch.bfloat16):
        found = interpret(graph, model, {"x": x})[made].dtype
    said = runtime_dtypes(graph, precision("bf16-autocast"), "cpu")[made]
    assert found is torch.bfloat16 and said == "bfloat16"
