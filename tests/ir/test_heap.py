"""Freed memory stays in the process."""

import resource
import sys

import pytest
import torch

from meshwright.ir.heap import give_back_freed_memory, keep_freed_memory
from meshwright.runtime.resident import resident_bytes
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


def _resident() -> tuple[int, int, int]:
    """After a large tensor was freed below one that is still held, and when it was given back."""
    keep_freed_memory()
    before, large = resident_bytes(), torch.ones(2**25)
    held = torch.ones(2**10)
    del large
    freed, given = resident_bytes(), give_back_freed_memory()
    del held  # not before
    return before, freed, resident_bytes() if given else 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_what_is_free_can_be_given_back_once() -> None:
    ((before, freed, after),) = run_ranks(1, _resident)
    assert freed - before > 100 * 2**20 and 0 < after - before < 30 * 2**20
