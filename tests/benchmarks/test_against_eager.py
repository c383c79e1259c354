"""A job's step calls no more operators than the same step in plain PyTorch, and finds its loss."""

import pytest

from benchmarks.against_eager import (
    CASES,
    HotCase,
    batches,
    eager_step,
    job_step,
    operators,
)
from benchmarks.dropping import compared, gpt2


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_calls_no_more_operators_than_plain_pytorch(case: HotCase) -> None:
    """The count is the same every time, where times on a shared machine are not."""
    mine, theirs, given = job_step(case, "none"), eager_step(case), batches()
    for _ in range(2):
        batch = next(given)
        ours, plain = float(mine(batch)), float(theirs(batch))
        assert ours == pytest.approx(plain, rel=case.rounding)
    batch = next(given)
    assert operators(mine, batch) <= operators(theirs, batch)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_dropout_calls_no_operators_for_each_sample(microbatches: int) -> None:
    """A mask has one draw, however many samples it is for."""
    found = compared(gpt2, 0.1, microbatches, 1)
    assert found.ours <= found.theirs
