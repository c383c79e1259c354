"""Kernels that read and write the memory of other ranks, which here all lies in one process."""

from itertools import product

import pytest
import torch

from meshwright.ir.kernels import gather_linear
from tests.codegen.kernels.peers_cases import CASES, DTYPES, RANKS, SHAPES
from tests.interpreted import printed


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[float]]:
    pytest.importorskip("triton")
    found: dict[str, list[float]] = printed("tests.codegen.kernels.peers_cases")
    return found


@pytest.mark.parametrize(("kernel", "dtype"), list(product(CASES, DTYPES)))
def test_by_triton(interpreted, kernel, dtype):
    found = [interpreted[f"{kernel} {dtype} {ranks}"] for ranks in RANKS]
    assert all(len(errors) >= len(SHAPES) for errors in found)
    assert max(error for errors in found for error in errors) <= DTYPES[dtype], found


@pytest.mark.parametrize("inner", [1, 2, 6])
def test_parts_in_the_order_of_the_whole(inner):
    """What ranks hold of a dim that others come before, put together."""
    whole = torch.arange(3 * 6 * 2).view(6 // inner, 3, inner, 2)
    parts = whole.transpose(0, 1).reshape(3, 6, 2)
    assert torch.equal(gather_linear.in_order(parts, inner), whole.view(-1, 2))
