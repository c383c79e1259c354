"""The README's example prints what the README says."""

from docs.readme import README, printed, with_printed


def test_the_example_prints_what_is_shown():
    text = README.read_text()
    assert with_printed(text, "other\n") != text
    assert with_printed(text, printed()) == text, "run `python -m docs.readme`"
