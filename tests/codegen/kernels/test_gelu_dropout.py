"""GELU with dropout: masks of both directions agree, and belong to samples, by either way."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn.functional import gelu

from meshwright.ir import launch
from meshwright.ir.kernels.bias_gelu.dropout import gelu_dropout, masks

LAYOUTS: list[tuple[tuple[int, ...], int, int, int]] = [
    ((3, 2, 37), 0, 1, 1),
    ((2, 4, 5), 1, 1, 2),
    ((8, 7), 0, 2, 2),
    ((3, 5), -1, 1, 1),
]
"""Shape, the dim of samples, its sections and the elements of each sample in one."""
P = 0.25


def _case(index: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    shape, dim, outer, per_sample = LAYOUTS[index]
    generator = torch.Generator().manual_seed(index)
    here = torch.get_default_device()
    x, bias = (
        torch.randn(s, generator=generator, device="cpu").to(here, dtype)
        for s in (shape, shape[-1:])
    )
    count = shape[dim] // (outer * per_sample) if dim >= 0 else 1
    seeds = [(1 << 62) + 1000 * i + index for i in range(count)]
    return x.requires_grad_(), bias.requires_grad_(), True, P, seeds, dim, outer, per_sample


def difference(index: int) -> list[float]:
    """Of result and gradients, from those with the mask that the result shows."""
    x, bias, tanh, p, *where = _case(index)
    made = gelu_dropout(x, bias, tanh, p, *where)
    weight = torch.linspace(-1, 1, made.numel()).view(made.shape)
    found = [made, *torch.autograd.grad((made * weight).sum(), (x, bias))]
    exact = [value.detach().double().requires_grad_() for value in (x, bias)]
    kept = (made.detach() != 0).double() / (1 - p)
    wanted = gelu(exact[0] + exact[1], approximate="tanh") * kept
    others = [wanted, *torch.autograd.grad((wanted * weight).sum(), exact)]
    return [(a.double() - b).abs().max().item() for a, b in zip(found, others, strict=True)]


def apart(index: int) -> float:
    """Of samples at once from one after the other."""
    x, bias, tanh, p, seeds, dim, outer, per_sample = _case(index)
    whole = gelu_dropout(x, bias, tanh, p, seeds, dim, outer, per_sample)
    if dim < 0:
        return 0.0
    shape = (*x.shape[:dim], outer, len(seeds), per_sample, *x.shape[dim + 1 :])
    small = (*x.shape[:dim], outer * per_sample, *x.shape[dim + 1 :])
    parts: list[Tensor] = []
    for sample, seed in enumerate(seeds):
        own = x.view(shape).select(dim + 1, sample).reshape(small)
        made = gelu_dropout(own, bias, tanh, p, [seed], dim, outer, per_sample)
        parts.append(made.view(*shape[: dim + 1], *shape[dim + 2 :]))
    return (torch.stack(parts, dim + 1).view(x.shape) - whole).abs().max().item()


def share_kept() -> float:
    """Of many elements."""
    x, bias = torch.ones(4, 2048), torch.zeros(2048)
    made = gelu_dropout(x, bias, False, P, [7, 8, 9, 10], 0, 1, 1)
    return (made != 0).double().mean().item()


def _ok(found: dict[str, Any]) -> None:
    assert all(max(errors) <= 1e-5 for errors in found["errors"]), found
    assert max(found["apart"]) <= 1e-6 and abs(found["kept"] - (1 - P)) < 0.02, found


def under() -> dict[str, Any]:
    indices = range(len(LAYOUTS))
    return {
        "way": launch.way("test", torch.zeros(1)), "errors": [difference(i) for i in indices],
        "apart": [apart(i) for i in indices], "kept": share_kept(),
    }  # fmt: skip


def test_by_torch():
    found = under()
    assert found["way"] == "torch"
    _ok(found)


def test_by_torch_the_mask_is_that_of_dropout_alone():
    for index in range(len(LAYOUTS)):
        x, bias, tanh, p, *where = _case(index, torch.float64)
        alone = gelu(x + bias, approximate="tanh") * masks(x, p, *where) / (1 - p)
        assert torch.equal(gelu_dropout(x, bias, tanh, p, *where), alone)


def test_by_triton():
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.kernels.test_gelu_dropout"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert found["way"] == "triton"
    _ok(found)


def test_torch_sees_through_it():
    opcheck(gelu_dropout, _case(0))


if __name__ == "__main__":
    print(json.dumps(under()))
