"""Freed memory stays in the process."""

import resource
import sys

import pytest
import torch

from meshwright.ir.heap import keep_freed_memory
from tests.spawn import run_ranks


def _faults() -> tuple[bool, int]:
    """Whether it worked, and page faults of ten large tensors, one after the other."""
    torch.set_num_threads(1)
    kept = keep_freed_memory()
    for _ in range(30):
        torch.ones(2**24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**24)
    return kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_memory_is_not_faulted_in_again() -> None:
    ((kept, faults),) = run_ranks(1, _faults)
    assert kept
    assert faults < 2**24 * 4 // 4096  # fewer than one tensor's pages, of ten
