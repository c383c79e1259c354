"""What a process with fake GPUs found is not lost in how it ends."""

import atexit
import os

import pytest

from meshwright.testing.fake_gpu import process
from meshwright.testing.fake_gpu.beside import beside_guard

pytestmark = pytest.mark.skipif(bool(process.why_not()), reason=process.why_not())


def _dies_at_exit() -> str:
    atexit.register(os.abort)
    return "found"


def test_a_process_that_would_die_as_it_ends_gives_its_result() -> None:
    assert beside_guard(_dies_at_exit) == "found"
