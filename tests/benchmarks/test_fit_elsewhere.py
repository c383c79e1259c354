"""Bands of other machines cover what was measured on them."""

from math import inf

from benchmarks.fit.elsewhere import least_covering


def test_the_least_error_that_covers_four_fifths_of_what_comes() -> None:
    four = [(error, 1.0) for error in (0.4, 0.1, 0.3, 0.2)]
    assert least_covering(four) == 0.4 and least_covering(four, 0.6) == 0.3
    assert least_covering(four[:3]) == inf
    # Of one source with many cases each counts as much less.
    many = [(0.01, 1 / 99)] * 99 + [(error, 1.0) for error in (0.2, 0.3, 0.5)]
    assert least_covering(many) == 0.5
