"""Steps of the day fit its budget."""

import pytest

from benchmarks.gpu.step import BUDGET_S, Step, checked, load_steps
from meshwright.ir.errors import PlanError


def test_steps_of_one_device_fit_the_budget():
    steps = load_steps()
    assert sum(step.limit_s for step in steps if step.gpus < 2) <= BUDGET_S < 600
    assert all(step.does and step.least_s <= step.limit_s for step in steps)


def test_a_step_without_a_sound_limit_is_refused():
    with pytest.raises(PlanError, match="0 < least_s <= limit_s <= 570"):
        Step(name="x", does="", order=1, limit_s=1, least_s=2, run=lambda place: iter(()))


@pytest.mark.parametrize(
    "fact", [("a/b/c", 1), ("", 1), ("x", float("inf")), ("x", [1]), "x", ("\n", 1)]
)
def test_facts_that_cannot_be_kept_are_refused(fact):
    with pytest.raises(PlanError):
        checked(fact)


def test_texts_are_cleaned_and_cut():
    assert checked(("x", "\x1b[2J" + "a" * 9999)) == ("x", " [2J" + "a" * 1996)
