"""torch's optimizers step narrow numbers as they step wide ones, to rounding, by whichever of their
kernels a job takes: fused SGD for CPUs does not."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.updates import UPDATES, fuse, kind_of, update

FUSED = [name for name in UPDATES if "fused" in inspect.signature(kind_of(name)).parameters]
STEPS, SIZES = 4, (8, 24, 33, 1000)
"""Fewer than a vector of the processor has, and more, with a rest and without."""


def _drawn(size: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=draw).to(dtype) for _ in range(1 + STEPS)]


def _trained(optimizer: torch.optim.Optimizer, p: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    for gradient in gradients:
        p.grad = gradient.to(p.dtype)
        optimizer.step()
    return p.detach().double()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_those_that_a_plan_names(name: str, dtype: torch.dtype, size: int) -> None:
    begin, *gradients = _drawn(size, dtype)
    found = []
    for wide in (dtype, torch.float64):
        p = nn.Parameter(begin.to(wide, copy=True))
        found.append(_trained(update(name).make([p], 0.05, fused=True), p, gradients))
    torch.testing.assert_close(*found, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}])
def test_those_that_users_bring(more: Mapping[str, Any], size: int) -> None:
    begin, *gradients = _drawn(size, torch.bfloat16)
    found = []
    for wide in (torch.bfloat16, torch.float64):
        p = nn.Parameter(begin.to(wide, copy=True))
        optimizer = torch.optim.SGD([p], lr=0.05, **more)
        fuse(optimizer)
        found.append(_trained(optimizer, p, gradients))
    torch.testing.assert_close(*found, rtol=0, atol=8 * torch.finfo(torch.bfloat16).eps)
