"""Freed memory stays in the process."""

import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from meshwright.ir.heap import give_back_freed_memory, keep_freed_memory, kept_apart
from meshwright.runtime.record.resident import resident_bytes
from meshwright.testing.fresh import python
from meshwright.testing.spawn import run_ranks


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


def _resident() -> tuple[bool, int, int, int]:
    """Whether it worked; bytes before, after a large tensor was freed below one that is still held,
    and when it was given back. What a fork inherits is given back first."""
    keep_freed_memory()
    give_back_freed_memory()
    before, large = resident_bytes(), torch.ones(2**25)
    held = torch.ones(2**10)
    del large
    freed, given = resident_bytes(), give_back_freed_memory()
    del held  # not before
    return given, before, freed, resident_bytes()


def _resident_after_others() -> tuple[bool, int, int, int]:
    """The same in a process that has freed much before."""
    keep_freed_memory()
    torch.ones(2**24)
    return _resident()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
@pytest.mark.parametrize("process", [_resident, _resident_after_others])
def test_what_is_free_can_be_given_back_once(process: Callable[[], object]) -> None:
    ((given, before, freed, after),) = run_ranks(1, process)
    assert given and freed - before > 100 * 2**20
    assert freed - after > 100 * 2**20 and after - before < 30 * 2**20


def _apart() -> tuple[int, int]:
    """What stays of a large tensor that is freed below one that is held: apart, in the heap."""
    keep_freed_memory()
    give_back_freed_memory()
    found = []
    for inside in (kept_apart(), nullcontext()):
        with inside:
            before, large = resident_bytes(), torch.ones(2**25)
            held = torch.ones(2**10)
            del large
            found.append(resident_bytes() - before)
            del held  # not before
    return found[0], found[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_what_is_kept_apart_goes_when_it_is_freed() -> None:
    # In a process whose heap has no holes: these serve what lies apart, too.
    asked = python("-c", "from tests.ir.test_heap import _apart; print(*_apart())")
    apart, kept = map(int, asked.stdout.split())
    assert apart < 30 * 2**20 and kept > 100 * 2**20
