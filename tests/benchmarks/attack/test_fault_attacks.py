"""A slice of the attacks with faults: those on checkpoints, which take no processes."""

import random

import pytest

from benchmarks.attack import faults


@pytest.mark.parametrize("name", random.Random(1).sample(sorted(faults.DAMAGE), 6))
def test_damage(name, tmp_path):
    assert faults._damaged(faults.DAMAGE[name], tmp_path).startswith("refused")


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits(seed, tmp_path):
    chosen = random.Random(seed)
    faults._flipped(chosen.random(), chosen.random(), tmp_path)
