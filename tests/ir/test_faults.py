"""When to save, and how often machines fail."""

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.faults.mix import LLAMA_3
from meshwright.ir.faults.saving import SavingCost


def test_the_published_run():
    assert LLAMA_3.count == 419
    assert LLAMA_3.between_s(16_384) / 3600 == pytest.approx(3.09, abs=0.01)
    assert LLAMA_3.between_s(1) / 3600 == pytest.approx(50_700, rel=0.001)


@pytest.mark.parametrize(
    ("held_s", "write_s", "between_s"),
    [(1, 60, 11_135), (30, 30, 11_135), (300, 0, 3600), (0.1, 1, 1e6), (5, 900, 11_135)],
)
def test_the_interval_loses_least(held_s, write_s, between_s):
    """To the half percent of what is lost that Daly's terms are beyond the first order."""
    cost = SavingCost(held_s=held_s, write_s=write_s, between_s=between_s)
    others = [cost.interval_s * 1.02**k for k in range(-200, 200)]
    least = min(cost.lost(each) for each in others if each >= write_s)
    assert cost.interval_s >= write_s and least <= cost.lost(cost.interval_s) <= 1.005 * least


def test_the_interval_is_dalys():
    """sqrt(2 x 300 x 3600) (1 + sqrt(1 / 24) / 3 + 1 / 216) - 300."""
    found = SavingCost(held_s=300.0, write_s=0.0, between_s=3600.0).interval_s
    assert found == pytest.approx(1276.5, abs=0.05)


def test_what_no_job_has_is_refused():
    for wrong in ({"held_s": -1.0}, {"between_s": 0.0}, {"write_s": float("nan")}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            SavingCost(**{"held_s": 1.0, "write_s": 1.0, "between_s": 9.0} | wrong)
    with pytest.raises(PlanError, match="interval_s is 0"):
        SavingCost(held_s=1.0, write_s=1.0, between_s=9.0).lost(0)
