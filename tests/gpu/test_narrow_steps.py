"""torch's optimizers step narrow numbers as they step wide ones, to rounding, by whichever of their
kernels a job takes: fused SGD for CPUs does not."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.updates import UPDATES, fuse, kind_of, update
from tests.gpu.devices import DEVICES, on_each

NAMED = [name for name in UPDATES if "fused" in inspect.signature(kind_of(name)).parameters]
BROUGHT = {
    "plain": {}, "momentum": {"momentum": 0.9},
    "decay": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
}  # fmt: skip
"""Settings of SGD that a user makes."""
DTYPES = ("float16", "bfloat16")
STEPS, SIZES = 4, (8, 24, 33, 1000)
"""Fewer than a vector of a processor has, and more, with a rest and without."""


def _made(way: str, p: nn.Parameter) -> torch.optim.Optimizer:
    if way not in BROUGHT:
        return update(way).make([p], 0.05, fused=True)
    made = torch.optim.SGD([p], lr=0.05, **BROUGHT[way])
    fuse(made)
    return made


def _trained(way: str, p: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    optimizer = _made(way, p)
    for gradient in gradients:
        p.grad = gradient.to(p.device, p.dtype)
        optimizer.step()
    return p.detach().double()


def _worst(name: str, device: str) -> float:
    """How far steps lead from those in float64, in units of rounding, of the worst size."""
    way, dtype = name.split()[0], getattr(torch, name.split()[1])
    found = 0.0
    for size in SIZES:
        draw = torch.Generator().manual_seed(size)
        begin, *gradients = [torch.randn(size, generator=draw).to(dtype) for _ in range(1 + STEPS)]
        narrow, wide = (
            _trained(way, nn.Parameter(begin.to(device, kind, copy=True)), gradients)
            for kind in (dtype, torch.float64)
        )
        found = max(found, float((narrow - wide).abs().max()) / torch.finfo(dtype).eps)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_narrow_numbers_are_stepped_as_wide_ones(device: str) -> None:
    names = [f"{way} {dtype}" for way in (*NAMED, *BROUGHT) for dtype in DTYPES]
    found = on_each(device, _worst, names)
    assert not {name: units for name, units in found.items() if units > 8}
