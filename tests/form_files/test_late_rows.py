"""Rows that nobody reads next, a step later: equal to one process, whatever is known of the next
batch and whoever reads in between."""

import pytest

from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.owners import plan_of, trained
from tests.form_files.words import assert_equal, plain


@pytest.mark.parametrize(
    ("ranks", "optimizer", "known"),
    [(1, "sgd", "all"), (2, "adamw", "all"), (2, "sgd", "some"), (2, "adamw", "none"),
     (3, "adagrad", "all"), (4, "sgd_momentum", "all"), (5, "adam", "some"), (2, "adam", "read")],
)  # fmt: skip
def test_training_is_that_of_one_process(ranks: int, optimizer: str, known: str) -> None:
    """With decay, moments and counts of steps; one of the ranks may have no row of a table."""
    found = run_ranks(ranks, trained, plan_of(ranks, optimizer, form="late_rows"), known)[0]
    assert_equal(found, alone(plain, optimizer, 0.05, None))
