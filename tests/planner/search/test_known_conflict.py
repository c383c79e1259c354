"""Pins that no plan keeps, said without a search."""

import pytest

from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.infeasible import known_conflict
from meshwright.planner.search.search import search_problem
from meshwright.testing.models import CASES
from tests.planner.problems import cluster, mlp, problem


def _sequential() -> Graph:
    case = CASES["sequential"]
    return trace(case.model(), case.example(), case.loss_fn)


def _asked(*pins: str) -> Problem:
    return problem(mlp(), cluster(4), constraints=pins)


@pytest.mark.parametrize(
    "pins",
    [("pp=2", "tp=2"), ("tp=2", "tp<=4"), ("zero=1", "stage 1 zero=2"), ("saved=none",)],
    ids=str,
)
def test_others_are_left_to_the_search(pins: tuple[str, ...]) -> None:
    assert known_conflict(_asked(*pins)) is None


def test_two_numbers_for_one_decision() -> None:
    error = known_conflict(_asked("zero=1", "tp=2", "zero=2"))
    assert str(error) == (
        "no plan meets 'zero=1' and 'zero=2' together; without 'zero=1': zero=2; "
        "without 'zero=2': zero=1"
    )


def test_values_that_no_block_has() -> None:
    with pytest.raises(Infeasible, match=r"'saved=selective': no block .* nearest: saved=none"):
        search_problem(make_problem(_sequential(), cluster(2), constraints=("saved=selective",)))


def test_what_rules_out_pipelines_rules_out_schedules_made_for_them() -> None:
    """The conflict is named, and more time is not asked for."""
    with pytest.raises(Infeasible) as error:
        search_problem(_asked("prefetch=2", "schedule=synthesised", "zero=0"))
    assert str(error.value).startswith("no plan meets 'prefetch=2'")
    assert "time_limit_s" not in str(error.value)
