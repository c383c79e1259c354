"""Dtypes under autocast, against what torch gives."""

import torch
from torch import nn

from meshwright.costmodel.ops.dtypes import runtime_dtypes
from meshwright.ir.graph.graph import Graph
from meshwright.ir.precision import precision
from meshwright.ir.trace.trace import trace


class Convolutions(nn.Module):
    """Convolution, batch-norm, activation: batch-norm runs in what the convolution gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm(self.conv(x))
        self.dtype = seen.dtype
        return self.fc(seen.relu().mean((2, 3)))  # type: ignore[no-any-return]


def _loss(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(out, wanted)


def traced() -> tuple[Convolutions, tuple[torch.Tensor, ...], Graph]:
    model = Convolutions()
    batch = torch.randn(4, 3, 8, 8), torch.randn(4, 1)
    return model, batch, trace(model, batch, _loss)


def test_batch_norm_keeps_the_dtype_that_it_gets() -> None:
    model, batch, graph = traced()
    with torch.autocast("cpu", torch.bfloat16):
        model(batch[0])
    norm = next(op for op in graph.ops if "batch_norm" in op.target)
    assert model.dtype is torch.bfloat16
    assert runtime_dtypes(graph, precision("bf16-autocast"))[norm.outputs[0]] == "bfloat16"
    assert runtime_dtypes(graph, precision("fp32"))[norm.outputs[0]] == "float32"
