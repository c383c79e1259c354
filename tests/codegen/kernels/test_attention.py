"""Attention with dropout: its kernel drops what scores that are whole do."""

import json
import os
import subprocess
import sys

import pytest

from meshwright.ir.random import dropped_attention
from meshwright.testing.machine_code import machine_code
from tests.codegen.kernels.attention_cases import CASES, errors


@pytest.mark.parametrize("name", CASES)
def test_by_torch(name):
    assert max(errors(name)) <= 1e-12


def test_by_triton():
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.kernels.attention_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout)
    assert all(max(each) <= 1e-12 for each in found["errors"].values()), found
    whys = {why for kernel, why in found["taken"] if kernel == "dropped_attention"}
    assert whys == {
        "", "the mask wants a gradient, or has more dims than queries",
        "heads are 8 wide, kernels are for 16 to 128",
    }  # fmt: skip


@pytest.mark.parametrize("target", [80, 90])
def test_it_spills_nothing(target):
    """At the widest heads, of which registers hold most; `benchmarks.kernel_code` has all."""
    pytest.importorskip("triton")
    causal = [b for b in dropped_attention.builds("bf16", 128) if b.constants["CAUSAL"]]
    assert len(causal) == 3
    for build in causal:
        code = machine_code(build, target)
        assert code.spills() == code.spilled_bytes == 0, build.kernel
