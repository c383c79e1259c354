"""The benchmark of alternating directions on digits, a slice of it."""

import pytest

pytest.importorskip("sklearn")

from benchmarks.admm_digits import alternating, plan_of, rises
from meshwright.testing.spawn import run_ranks


def test_two_ranks_learn_and_the_lagrangian_never_rises() -> None:
    values, right = run_ranks(2, alternating, plan_of(16, 2, 300, penalty=1e4), 16, 0, 60)[0]
    assert not rises(values) and values[-1] < 0.5 * values[0]
    assert right > 0.4, right  # a tenth by chance
