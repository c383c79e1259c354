"""Every kernel against its reference in float64: at odd sizes, and at those of real models."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from meshwright.ir import launch
from meshwright.ir.kernels import route
from tests.codegen.kernels import (
    test_bucket,
    test_bucket_update,
    test_gelu_dropout,
    test_peers,
)
from tests.codegen.kernels.cases import CASES, DTYPES, Found, check
from tests.gpu.devices import DEVICES, on_each

REAL_DTYPES = ("float32", "bfloat16")
TOKENS = {"cpu": 6, "cuda": 4096}
"""Rows of the cases of real models; on the CPU few, at the same widths."""


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _norm(tokens: int, width: int, inputs: int, gains: int, eps: float) -> tuple[Any, ...]:
    return (
        *(_normal(tokens, width) for _ in range(inputs)),
        *(_normal(width) for _ in range(gains)), eps,
    )  # fmt: skip


def _labels(tokens: int, words: int) -> torch.Tensor:
    labels = torch.randint(0, words, (tokens,))
    return labels.masked_fill(torch.arange(tokens) % 3 == 2, -100)


def _rotary(tokens: int) -> tuple[Any, ...]:
    """Heads as they lie after their projection: turned."""
    positions = max(1, tokens // 2)
    angle = torch.rand(1, positions, 64, dtype=torch.float64).repeat(1, 1, 2)
    return _normal(2, positions, 32, 128).transpose(1, 2), angle.cos(), angle.sin()


def _routes(tokens: int, home: bool) -> tuple[Any, ...]:
    owned = torch.arange(8 * tokens).view(8, tokens) % 4 == 1
    owned[0] = True
    to, places = route.places_of(owned)
    return _normal(len(to) if home else tokens, 4096), to, places


REAL: dict[str, Callable[[int], list[tuple[Any, ...]]]] = {
    # Llama 3 8B and 70B, GPT-2-XL (whose width 16 does not divide by itself), a width of no model.
    "rms_norm": lambda n: [_norm(n, w, 1, 1, 1e-6) for w in (4096, 8192)],
    "add_rms_norm": lambda n: [_norm(n, w, 2, 1, 1e-6) for w in (4096, 4097)],
    "add_layer_norm": lambda n: [_norm(n, w, 2, 2, 1e-5) for w in (1600, 1024)],
    "swiglu": lambda n: [(_normal(n, 14336), _normal(n, 14336))],
    "bias_gelu": lambda n: [(_normal(n, 6400), _normal(6400), tanh) for tanh in (False, True)],
    # GPT-2's vocabulary, the next multiple of 64, Llama 3's.
    "cross_entropy": lambda n: [
        (_normal(n // 4 + 1, words), torch.randint(0, words, (n // 4 + 1,)))
        for words in (50257, 50304)
    ],
    "cross_entropy_total": lambda n: [
        (_normal(n // 8 + 1, 128256), _labels(n // 8 + 1, 128256), -100)
    ],
    "linear_cross_entropy": lambda n: [
        (_normal(n, 1024) / 8, _normal(8192, 1024), _labels(n, 8192), -100)
    ],
    "rotary": lambda n: [_rotary(n)],
    "route_out": lambda n: [_routes(n, home=False)],
    "route_home": lambda n: [_routes(n, home=True)],
}


def _against_float64(kernel: str, device: str) -> list[Found]:
    odd = [*check(kernel)]
    real = [*check(kernel, REAL[kernel](TOKENS[device]), REAL_DTYPES)]
    return odd + [replace(one, case=100 + one.case) for one in real]


@cache
def _found(device: str) -> dict[str, list[Found]]:
    # Those that take longest come first.
    order = sorted(CASES, key=lambda kernel: "entropy" not in kernel)
    found: dict[str, list[Found]] = on_each(device, _against_float64, order)
    return found


def test_every_kernel_has_cases_of_real_models() -> None:
    assert set(REAL) == set(CASES)


@pytest.mark.parametrize("kernel", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_is_its_reference(device: str, kernel: str) -> None:
    found = _found(device)[kernel]
    assert {one.dtype for one in found} == {*DTYPES} and max(one.case for one in found) >= 100
    for one in found:
        assert max(one.errors) <= DTYPES[one.dtype], one
    ways = {one.way for one in found if one.case >= 100}
    assert ways == {"triton" if device == "cuda" else "torch"}, "no real case takes another way"


def _bucket(name: str, device: str) -> list[tuple[float, float]]:
    return [
        (test_bucket.difference(source, flat, scale),
         2**-7 if (source, flat) == ("float32", "bfloat16") else 0.0)
        for source, flat, scale in test_bucket.CASES
    ]  # fmt: skip


def _bucket_update(name: str, device: str) -> list[tuple[float, float]]:
    every = product(range(len(test_bucket_update.OPTIMIZERS)), test_bucket_update.DTYPES.items())
    return [
        (test_bucket_update.difference(index, getattr(torch, dtype)), bound)
        for index, (dtype, bound) in every
    ]


def _gelu_dropout(name: str, device: str) -> list[tuple[float, float]]:
    found = test_gelu_dropout.under()
    errors = [(max(errors), 1e-5) for errors in found["errors"]]
    apart = [(worst, 1e-6) for worst in found["apart"]]
    return [*errors, *apart, (abs(found["kept"] - (1 - test_gelu_dropout.P)), 0.02)]


def _peers(name: str, device: str) -> list[tuple[float, float]]:
    """Kernels that read the memory of peers, which here lies on one device; only by Triton."""
    dtypes = test_peers.DTYPES | {"bfloat16": 3e-2}
    return [
        (error, bound)
        for (dtype, bound), ranks in product(dtypes.items(), test_peers.RANKS)
        for error in test_peers.CASES[name](getattr(torch, dtype), ranks)
    ]


OTHERS = {"bucket": _bucket, "bucket_update": _bucket_update, "gelu_dropout": _gelu_dropout}


def _other(name: str, device: str) -> tuple[list[tuple[float, float]], str]:
    found = OTHERS.get(name, _peers)(name, device)
    return found, launch.way("test", torch.zeros(1))


@cache
def _others(device: str) -> dict[str, Any]:
    names = [*OTHERS] if device == "cpu" else [*OTHERS, *test_peers.CASES]
    return on_each(device, _other, names)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(("cpu", name) for name in OTHERS),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu)
          for name in (*OTHERS, *test_peers.CASES)),
    ],
)  # fmt: skip
def test_buckets_steps_dropout_and_peers_are_their_references(device: str, name: str) -> None:
    """Those of peers run on the CPU under Triton's interpreter alone (test_peers)."""
    found, way = _others(device)[name]
    assert way == ("triton" if device == "cuda" else "torch") and len(found) >= 3
    for number, (error, bound) in enumerate(found):
        assert error <= bound, f"case {number}: {error} > {bound}"
