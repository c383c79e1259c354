"""Every kernel against its reference in float64: at odd sizes, and at those of real models."""

from collections import Counter
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
    attention_cases,
    bucket_cases,
    bucket_update_cases,
    gelu_dropout_cases,
    peers_cases,
)
from tests.codegen.kernels.cases import CASES, DTYPES, Found, check
from tests.gpu.devices import DEVICES, each_name, on_each

REAL_DTYPES = ("float32", "bfloat16")
TOKENS = {"cpu": 6, "cuda": 2048}
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
    # GPT-2's vocabulary, and the next multiple of 64.
    "cross_entropy": lambda n: [
        (_normal(n // 4 + 1, words), torch.randint(0, words, (n // 4 + 1,)))
        for words in (50257, 50304)
    ],
    "cross_entropy_total": lambda n: [
        (_normal(n // 4 + 1, 50257), _labels(n // 4 + 1, 50257), -100)
    ],
    "linear_cross_entropy": lambda n: [
        (_normal(n, 1024) / 8, _normal(8192, 1024), _labels(n, 8192), -100)
    ],
    "rotary": lambda n: [_rotary(n), (*_rotary(n), True)],
    "route_out": lambda n: [_routes(n, home=False)],
    "route_home": lambda n: [_routes(n, home=True)],
}


def _against_float64(kernel: str, device: str) -> tuple[list[Found], set[str]]:
    """On a GPU odd sizes in two dtypes, as each combination is compiled. Also why real sizes were
    not Triton's."""
    odd = [*check(kernel, dtypes=REAL_DTYPES if device == "cuda" else (*DTYPES,))]
    before = Counter(launch.TAKEN)
    real = [*check(kernel, REAL[kernel](TOKENS[device]), REAL_DTYPES)]
    whys = {why for (name, why) in launch.TAKEN - before if name != "test"}
    return odd + [replace(one, case=100 + one.case) for one in real], whys


def _bucket() -> list[tuple[float, float]]:
    return [
        (bucket_cases.difference(source, flat, scale),
         2**-7 if (source, flat) == ("float32", "bfloat16") else 0.0)
        for source, flat, scale in bucket_cases.CASES
    ]  # fmt: skip


def _bucket_update() -> list[tuple[float, float]]:
    every = product(range(len(bucket_update_cases.OPTIMIZERS)), bucket_update_cases.DTYPES.items())
    return [
        (bucket_update_cases.difference(index, getattr(torch, dtype)), bound)
        for index, (dtype, bound) in every
    ]


def _gelu_dropout() -> list[tuple[float, float]]:
    """Masks are those that a CPU draws."""
    return [(max(errors), 1e-12) for errors in gelu_dropout_cases.under()["errors"]]


def _attention() -> list[tuple[float, float]]:
    """Two-byte values take the kernel on a GPU, others whole scores; masks are a CPU's for all."""
    bounds = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
    return [
        (max(attention_cases.errors(name, dtype, held=held)), bound)
        for name, (dtype, bound), held in product(
            attention_cases.CASES, bounds.items(), (False, True)
        )
    ]


def _peers(name: str) -> list[tuple[float, float]]:
    """Kernels that read the memory of peers, which here lies on one device; only by Triton."""
    dtypes = peers_cases.DTYPES | {"bfloat16": 3e-2}
    return [
        (error, bound)
        for (dtype, bound), ranks in product(dtypes.items(), peers_cases.RANKS)
        for error in peers_cases.CASES[name](getattr(torch, dtype), ranks)
    ]


OTHERS = {
    "attention": _attention,
    "bucket": _bucket,
    "bucket_update": _bucket_update,
    "gelu_dropout": _gelu_dropout,
}
NAMES = {"cpu": [*OTHERS], "cuda": [*OTHERS, *peers_cases.CASES]}
"""Those of peers run on the CPU under Triton's interpreter alone (`test_peers`)."""


def _body(name: str, device: str) -> Any:
    with torch.device(device):  # where tensors are made
        if name in CASES:
            return _against_float64(name, device)
        return OTHERS[name]() if name in OTHERS else _peers(name)


@cache
def _found(device: str) -> dict[str, Any]:
    # Those that take longest come first.
    return on_each(
        device, _body, sorted([*CASES, *NAMES[device]], key=lambda name: "norm" not in name)
    )


def test_every_kernel_has_cases_of_real_models() -> None:
    assert set(REAL) == set(CASES)


@pytest.mark.parametrize("kernel", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_is_its_reference(device: str, kernel: str) -> None:
    found, whys = _found(device)[kernel]
    assert len(found) >= 4 and max(one.case for one in found) >= 100
    for one in found:
        assert max(one.errors) <= DTYPES[one.dtype], one
    assert whys == {"" if device == "cuda" else "tensors are on cpu"}


@pytest.mark.parametrize(("device", "name"), each_name(NAMES))
def test_buckets_steps_dropout_and_peers_are_their_references(device: str, name: str) -> None:
    found = _found(device)[name]
    assert len(found) >= 3
    for number, (error, bound) in enumerate(found):
        assert error <= bound, f"case {number}: {error} > {bound}"
