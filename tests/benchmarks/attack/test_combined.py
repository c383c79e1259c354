"""Many pins at once: a few of the cases, and that a wrong run would be told."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.attack import combined
from benchmarks.attack.combined import Asked, Case, drawn, judged

CASES = (
    Case("dlrm", "adamw of two groups", True, (Asked(4, ("sync=by_owner", "tp_col=2")),)),
    Case("mixtral", "adam", True, (Asked(4, ("cp=2", "store=update_on_host", "tp=2")),)),
    Case(
        "sequential", "muon", False,
        (Asked(4, ("dp_shard=2", "recompute=full", "tp=1")), Asked(2, ("pp=2", "zero=0"))),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_right_or_refused(case: Case) -> None:
    held, what = judged(case)
    assert held and what.startswith("equal"), what


def test_a_run_that_is_not_that_of_one_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clipping, which the plan has."""
    plain = combined._plain
    monkeypatch.setattr(combined, "_plain", lambda c, b: plain(replace(c, clipped=False), b))
    held, what = judged(Case("sequential", "sgd with momentum", True, (Asked(2, ("tp=2",)),)))
    assert not held and "off" in what


def test_what_cannot_be_is_refused_in_words() -> None:
    held, what = judged(Case("sequential", "adam", False, (Asked(2, ("zero=1", "zero=2")),)))
    assert held and what == (
        "refused: meshwright.ir.errors.Infeasible: no plan meets 'zero=1' and 'zero=2' together; "
        "without 'zero=1': zero=2; without 'zero=2': zero=1"
    )


def test_equal_seeds_draw_equal_cases() -> None:
    first, again = ([drawn(draw) for _ in range(40)] for draw in (Random(5), Random(5)))
    assert first == again and len(set(first)) > 30
    for pins in (asked.pins for case in first for asked in case.plans):
        assert len({pin.split("=")[0] for pin in pins}) == len(pins)
