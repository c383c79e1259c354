"""Many pins at once: a few of the cases, and that a wrong run would be told."""

from random import Random

import pytest

from benchmarks.attack import combined
from benchmarks.attack.combined import Case, drawn, judged

CASES = (
    Case("dlrm", 4, "adamw of two groups", True, ("sync=by_owner", "tp_col=2")),
    Case("sequential", 4, "muon", False, ("dp_shard=2", "recompute=full", "tp=1")),
    Case("mixtral", 4, "adam", True, ("cp=2", "store=update_on_host", "tp=2")),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right_or_refused(case: Case) -> None:
    held, what = judged(case)
    assert held and what.startswith("equal"), what


def test_a_run_that_is_not_that_of_one_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping, which the plan has."""
    plain = combined._plain
    monkeypatch.setattr(combined, "_plain", lambda *a: plain(*a[:3], None))
    held, what = judged(Case("sequential", 2, "sgd with momentum", True, ("tp=2",)))
    assert not held and "off" in what


def test_what_cannot_be_is_refused_in_words() -> None:
    held, what = judged(Case("sequential", 2, "adam", False, ("zero=1", "zero=2")))
    assert held and what == (
        "refused: no plan meets 'zero=1' and 'zero=2' together; without 'zero=1': zero=2; "
        "without 'zero=2': zero=1"
    )


def test_equal_seeds_draw_equal_cases() -> None:
    first, again = ([drawn(draw) for _ in range(40)] for draw in (Random(5), Random(5)))
    assert first == again and len(set(first)) > 30
    assert all(len({pin.split("=")[0] for pin in case.pins}) == len(case.pins) for case in first)
