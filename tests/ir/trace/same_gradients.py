"""Gradients of a model's parameters by two ways of computing its loss."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_same(
    found: Sequence[Tensor | None], wanted: Sequence[Tensor | None], rtol: float = 1e-9,
    atol: float = 1e-12,
) -> None:  # fmt: skip
    """AssertionError unless both have the same gradients, and none of the same parameters."""
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=rtol, atol=atol)
