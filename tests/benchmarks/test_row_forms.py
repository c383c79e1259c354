"""A slice of the benchmark of forms for embedding tables."""

import pytest

from benchmarks.row_forms import case, is_least, library_row, library_tokens


@pytest.mark.parametrize("seed", range(12))
def test_the_form_is_the_one_that_sends_least(seed: int) -> None:
    steps, sent = case(seed)
    assert is_least(steps, sent), (steps, sent)


def test_rows_of_library_words_at_their_owners() -> None:
    """An eighth of what is gathered among 16 ranks, and a quarter of what every token sends."""
    row = library_row(library_tokens(), 16, 2048, 512)
    assert row["owned_rows"] <= 1.02 * row["gathered_rows"] / 8
    assert row["owned_rows"] * 4 <= row["every token"]
    assert row["packed_rows"] <= 0.19 * row["whole"]
