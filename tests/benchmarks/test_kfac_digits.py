"""K-FAC learns digits in few steps; the whole sweep is in docs/results/kfac.md."""

import pytest

from meshwright.testing.spawn import run_ranks

pytest.importorskip("sklearn")


def test_digits_are_learnt_in_few_steps() -> None:
    """SGD's best rate of a sweep takes 80 steps and more."""
    from benchmarks.kfac_digits import RANKS, learn

    for run in run_ranks(RANKS, learn, "kfac", 0.1, 0, 60):
        assert 0 < run.steps <= 45
