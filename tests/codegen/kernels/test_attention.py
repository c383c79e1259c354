"""Attention with dropout: its kernel drops what scores that are whole do."""

from dataclasses import replace

import pytest
import torch

from meshwright.ir.random import attention_tiles
from meshwright.ir.random.dropped_attention import why_not
from meshwright.testing.machine_code import machine_code
from tests.codegen.kernels.attention_cases import CASES, errors
from tests.interpreted import printed


@pytest.mark.parametrize("name", CASES)
def test_by_torch(name):
    assert max(errors(name)) <= 1e-12
    assert max(errors(name, held=True)) <= 1e-12


def test_by_triton():
    pytest.importorskip("triton")
    found = printed("tests.codegen.kernels.attention_cases")
    assert all(max(each) <= 1e-12 for each in found["errors"].values()), found
    whys = {why for kernel, why in found["taken"] if kernel == "dropped_attention"}
    assert whys == {
        "", "the mask wants a gradient, or has more dims than queries",
        "heads are 8 wide, kernels are for 16 to 256", "its part of the batch has too many dims",
    }  # fmt: skip


def test_what_kernels_would_read_beyond_is_refused():
    """They step from sample to sample and from head to head, whatever the keys have."""

    def why(samples: int, heads: int, width: int = 64, keys: int = 8) -> str:
        query = torch.empty(4, 6, 8, 64, dtype=torch.bfloat16, device="meta")
        key = torch.empty(samples, heads, 8, 64, dtype=torch.bfloat16, device="meta")
        value = torch.empty(samples, heads, keys, width, dtype=torch.bfloat16, device="meta")
        return why_not(query, key, value, None, 0, (-1,), (1,))

    assert why(4, 6) == why(4, 3) == "tensors are on meta" or why(4, 6) == "Triton is not installed"
    assert why(1, 6) == why(4, 4) and why(1, 6).startswith("samples share keys")
    assert why(4, 6, keys=4).startswith("operands are not")
    assert why(4, 6, 320).startswith("heads are 320 wide")


@pytest.mark.parametrize("target", [80, 90])
def test_it_spills_nothing(target):
    """At 128, which most models have; `tests/benchmarks/test_tiles.py` has all of the file. Also
    with a key that the device holds."""
    pytest.importorskip("triton")
    causal = [
        b for b in attention_tiles.builds("bf16", 128) if b.constants["CAUSAL"] and b.is_for(target)
    ]
    assert len(causal) == 3
    for build in causal:
        held = replace(build, signature={**build.signature, "key": "*i64"})
        for code in (machine_code(build, target), machine_code(held, target)):
            assert code.spills() == code.spilled_bytes == 0, build.kernel
