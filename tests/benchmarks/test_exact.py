"""The ILP searcher finds what the whole space has, and says so; bounds never exceed it."""

import pytest
from hypothesis import given, settings

from benchmarks.exact import compared
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.bounds.frames import frames
from meshwright.planner.bounds.leaf_bound import LeafBound
from meshwright.planner.bounds.relaxation import Relaxation
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.testing.tiny import Tiny, tiny
from tests.planner.problems import TINY, cluster, mlp, problem


@settings(max_examples=12, derandomize=True, database=None, deadline=None)
@given(tiny())
def test_equal_to_the_whole_space(instance: Tiny) -> None:
    row = compared(instance, most=60)
    assert row.agrees, row.steps
    assert row.bound_s <= 1.001 * row.steps[0]
    assert row.exhausted


def check_bounds(problem: Problem, every: int) -> int:
    """How many choices were compared with their bounds."""
    choices, runs = ChoiceSpace(problem), RunCosts(problem)
    relaxed, leaf = Relaxation(runs, choices.places), LeafBound(runs)
    least, compared_with = lower_bound(problem), 0
    for frame in frames(problem):
        bound_s = relaxed.bound(frame).seconds
        for choice in list(choices.of(frame))[::every]:
            plan = build_plan(problem, obey(problem, choice))
            assert plan.predicted
            step_s = plan.predicted.step_s * 1.001
            assert leaf.seconds(choice, rough=True) <= leaf.seconds(choice) <= step_s, choice
            if not excess_bytes(problem, plan):
                assert least <= bound_s <= step_s, choice
                compared_with += 1
    return compared_with


BOUNDED = ("two devices", "slow link", "zero bubble", "interleaved", "traced", "tight")


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_never_exceed_what_is_simulated(name: str) -> None:
    assert check_bounds(TINY[name](), every=2) > 5


@pytest.mark.sampled
@pytest.mark.parametrize("asked", [("memory<=60kB",), ("memory<=45kB", "pp=2"), ()])
def test_bounds_of_even_groups(asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on clusters where groups of devices are all of one size."""
    monkeypatch.setattr("meshwright.planner.bounds.frames.UNITS", 0)
    assert check_bounds(problem(mlp(4), cluster(4), constraints=asked), every=31) > 2
