"""Where the bodies of these tests run: on the CPU always, on a GPU under `pytest -m gpu`.

The process of pytest itself never uses CUDA, as it could not fork ranks that do. A body so runs in
processes of its own, several at once on a GPU, where compiling kernels takes most of the time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from meshwright.testing.spawn import run_ranks

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
WORKERS = {"cpu": 1, "cuda": 8}
"""Processes at once."""


def on_each(
    device: str, function: Callable[..., Any], names: Sequence[str], *args: Any
) -> dict[str, Any]:
    """What `function(name, device, *args)` returns for each name, in processes of their own. There
    torch makes tensors on the device."""
    workers = min(WORKERS[device], len(names))
    found = run_ranks(
        workers, _work, device, function, list(names), workers, args, init=False, timeout_s=240.0
    )
    return {name: result for part in found for name, result in part.items()}


def _work(
    rank: int, store: str, device: str, function: Any, names: list[str], workers: int, args: Any
) -> dict[str, Any]:
    # The longest come last: ranks take turns.
    with torch.device(device):
        return {name: function(name, device, *args) for name in names[rank::workers]}
