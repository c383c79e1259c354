"""Dropout, alone and after GELU: both directions and both ways draw the same numbers."""

import json
import os
import subprocess
import sys
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import gelu

from meshwright.ir import launch
from meshwright.ir.kernels.bias_gelu.dropout import gelu_dropout
from meshwright.ir.random.dropout import dropout, factors
from meshwright.ir.random.philox import kept_scale, least_kept, numbers
from meshwright.ir.random.strided import filled, span

PLACES: list[tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]] = [
    ((3, 2, 37), 0, (-1,), (1,)),
    ((3, 2, 37), 7, (-1,), (1,)),
    ((4, 64), 32, (-1, 64), (128, 1)),
    ((4, 3, 64), 64, (-1, 3, 64), (1536, 128, 1)),
    ((4, 6), 6, (-1, 6), (12, 1)),
    ((6, 1100), 0, (-1,), (1,)),
    ((2, 6, 5), 0, (2, -1, 10), (10, 20, 1)),
    ((3, 8), 5, (3, 2, -1), (2, 1, 6)),
    ((2, 2, 2, 2, 2), 3, (2, 2, 2, 2, -1), (160, 70, 30, 10, 1)),
    ((0, 8), 0, (-1,), (1,)),
]
"""Shape, first number, sizes and strides: in order, parts of samples, samples along rows, and more
dims than kernels count through."""
P, KEY = 0.25, (1 << 62) + 12345


def kept(index: int) -> Tensor:
    """Written out: what elements are multiplied by, in float64."""
    shape, first, sizes, strides = PLACES[index]
    if not prod(shape):
        return torch.zeros(shape, dtype=torch.float64)
    dims = filled(sizes, prod(shape))
    place = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, stride in zip(dims, strides, strict=True):
        place = place.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    drawn = numbers(KEY, first, span(dims, strides))[place.reshape(shape)]
    made = (drawn >= least_kept(P)).double() * kept_scale(P)
    return made.to(torch.get_default_device())


def _case(index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    shape, *where = PLACES[index]
    generator = torch.Generator("cpu").manual_seed(index)
    here = torch.get_default_device()
    x, bias = (
        torch.randn(s, generator=generator, device="cpu").to(here, dtype)
        for s in (shape, shape[-1:])
    )
    return x.requires_grad_(), bias.requires_grad_(), (P, KEY, *where)


def errors(index: int, dtype: torch.dtype = torch.float64) -> list[float]:
    """Of both ops' results and gradients, from what is written out."""
    x, bias, where = _case(index, dtype)
    weight = torch.linspace(-1, 1, max(x.numel(), 1), dtype=dtype)[: x.numel()].view(x.shape)
    found = []
    for made, right in (
        (dropout(x, *where), x * kept(index).to(dtype)),
        (
            gelu_dropout(x, bias, True, *where),
            gelu(x + bias, approximate="tanh") * kept(index).to(dtype),
        ),
    ):
        leaves = (x, bias) if made.grad_fn and len(found) else (x,)
        grads, wanted = (torch.autograd.grad((y * weight).sum(), leaves) for y in (made, right))
        for one, other in zip((made, *grads), (right, *wanted), strict=True):
            found.append((one - other).abs().max().item() if one.numel() else 0.0)
    return found


def under() -> dict[str, Any]:
    return {
        "way": launch.way("test", torch.zeros(1)),
        "errors": [errors(index) for index in range(len(PLACES))],
        "taken": [*launch.TAKEN],
    }


def test_by_torch():
    found = under()
    assert found["way"] == "torch"
    assert all(len(each) == 5 and max(each) <= 1e-12 for each in found["errors"]), found


def test_by_triton():
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.kernels.test_gelu_dropout"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["way"] == "triton" and ["dropout", ""] in found["taken"]
    assert all(len(each) == 5 and max(each) <= 1e-12 for each in found["errors"]), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype):
    x, _, where = _case(3, dtype)
    made = dropout(x, *where)
    weight = torch.linspace(-1, 1, x.numel(), dtype=dtype).view(x.shape)
    (grad,) = torch.autograd.grad(made, x, weight)
    # Rounded once: a factor in bfloat16 would be off by as much again, for all elements alike.
    assert torch.equal(made, (x.float() * kept(3).float()).to(dtype))
    assert torch.equal(grad, (weight.float() * kept(3).float()).to(dtype))


def test_a_tensor_keeps_its_memory_format():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    made = dropout(x, P, KEY, 0, (-1,), (1,))
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made, dropout(x.contiguous(), P, KEY, 0, (-1,), (1,)))


def test_torch_sees_through_them():
    x, bias, where = _case(2, torch.float32)
    opcheck(gelu_dropout, (x, bias, True, *where))
    given = (x.detach(), *where)
    opcheck(torch.ops.meshwright.dropout.default, given)
    opcheck(torch.ops.meshwright.dropout_factors.default, given)


def test_as_many_stay_as_are_said():
    made = factors(torch.empty(1000, 1000), P, 3, 0, (-1,), (1,))
    assert abs((made != 0).double().mean().item() - (1 - P)) < 0.003


if __name__ == "__main__":
    print(json.dumps(under()))
