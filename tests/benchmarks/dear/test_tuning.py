"""Tuning of bucket sizes: close to the best of a grid where the default is not, and honest ends."""

from importlib.util import find_spec

import pytest

from benchmarks.dear.tuning import DEFAULT_BYTES, HARD, NOISE, grid_s, step_of, tuned_s
from meshwright.runtime.step.tuning import BucketTuner

# Not imported before a test of these runs: it loads scikit-learn and much of SciPy.
pytestmark = pytest.mark.skipif(not find_spec("bayes_opt"), reason="needs bayesian-optimization")


@pytest.mark.parametrize("name", HARD, ids=lambda name: name[0])
def test_hard_cases_end_near_the_best_of_a_grid(name: str) -> None:
    case = HARD[name]
    best = grid_s(case)
    assert step_of(case)(DEFAULT_BYTES) > 1.06 * best
    for seed in (0, 1):
        assert tuned_s(case, seed, 0.0) <= 1.02 * best
    assert tuned_s(case, 0, NOISE) <= 1.04 * best


def test_the_first_step_of_a_trial_does_not_count() -> None:
    tuner = BucketTuner(1 << 10, 1 << 30, 1 << 20, steps=3)
    for seconds in (100.0, 2.0, 4.0):
        tuner.took(seconds)
    assert [(t.size_bytes, t.seconds) for t in tuner.tried] == [(1 << 20, 3.0)]


def test_sizes_stay_within_bounds_and_trials_end() -> None:
    tuner = BucketTuner(1 << 20, 1 << 24, 1 << 28, trials=6, steps=2)
    seen = {tuner.size_bytes}
    for _ in range(100):
        tuner.took(1.0 + 1e-9 * tuner.size_bytes)
        seen.add(tuner.size_bytes)
    assert tuner.done and len(tuner.tried) <= 6
    assert max(seen) == 1 << 24 and min(seen) >= 1 << 20


def test_a_flat_course_ends_early() -> None:
    tuner = BucketTuner(1 << 15, 1 << 28, 1 << 24, steps=2)
    for _ in range(40):
        tuner.took(1.0)
    assert tuner.done and len(tuner.tried) < 10


def test_one_size_needs_no_trial() -> None:
    tuner = BucketTuner(4096, 4096, 1 << 20)
    assert tuner.done and tuner.size_bytes == 4096 and not tuner.took(1.0)


def test_bad_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="from 8 to 4 bytes"):
        BucketTuner(8, 4, 4)
    with pytest.raises(ValueError, match="1 trial of 2 steps"):
        BucketTuner(4, 8, 4, steps=1)
