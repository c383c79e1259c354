"""Where the bodies of these tests run: on the CPU always, on a GPU under `pytest -m gpu`.

The process of pytest itself never uses CUDA, as it could not fork ranks that do. A body so runs in
processes of its own, many at once on a GPU, where compiling kernels takes most of the time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from meshwright.testing.spawn import run_ranks

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
WORKERS = {"cpu": 1, "cuda": 16}
"""Processes at once."""


def each_name(names: Mapping[str, Sequence[str]]) -> list[Any]:
    """Parameters (device, name) of a test."""
    on_cpu = [("cpu", name) for name in names["cpu"]]
    return on_cpu + [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names["cuda"]]


def on_each(
    device: str, function: Callable[..., Any], names: Sequence[str], *args: Any
) -> dict[str, Any]:
    """What `function(name, device, *args)` returns for each name, in processes of their own."""
    workers = min(WORKERS[device], len(names))
    found = run_ranks(
        workers, _work, device, function, list(names), workers, args, init=False, timeout_s=240.0
    )
    return {name: result for part in found for name, result in part.items()}


def _work(
    rank: int, store: str, device: str, function: Any, names: list[str], workers: int, args: Any
) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.set_device(0)
    return {name: function(name, device, *args) for name in names[rank::workers]}
