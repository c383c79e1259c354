"""Stages whose meshes are pinned: the search begins there, whatever groups its tables have."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.errors import Infeasible
from meshwright.planner.across.pinned_meshes import pinned_choices, proportional_cuts
from meshwright.planner.search.search import search_problem
from tests.planner.problems import cluster, mlp, problem


@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=12),
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
)
def test_no_part_is_empty(costs: list[float], shares: list[int]) -> None:
    cuts = [0, *proportional_cuts(costs, shares), len(costs)]
    assert len(cuts) == len(shares) + 1
    assert all(a < b for a, b in pairwise(cuts))


def test_parts_are_in_proportion() -> None:
    assert proportional_cuts([1.0] * 8, [6, 2]) == [6]
    assert proportional_cuts([1.0] * 8, [1, 2, 5]) == [1, 3]


@pytest.mark.parametrize(
    "pins",
    [
        ("pp=2", "stage 0 mesh dp_replicate=7", "stage 1 mesh dp_replicate=1"),
        ("stage 0 dp_replicate=7", "pp=2"),
        ("pp=2", "stage 1 mesh tp=2,dp_shard=3", "schedule=dapple_pb"),
    ],
)
def test_lopsided_meshes_are_found(pins: tuple[str, ...]) -> None:
    asked = problem(mlp(6), cluster(8), constraints=pins)
    plan = search_problem(asked)
    first, second = plan.stages
    assert len(first.devices) + len(second.devices) == 8
    if "dp_replicate=7" in " ".join(pins):
        assert (first.dp, second.dp) == (7, 1)
    else:
        assert (second.mesh["tp"], second.mesh["dp_shard"]) == (2, 3) and len(first.devices) == 2


def test_meshes_that_no_other_way_of_the_search_leads_to() -> None:
    pins = (
        "pp=4",
        "stage 0 mesh dp_replicate=4",
        "stage 3 mesh dp_replicate=2",
        "stage 1 mesh tp=1",
    )
    plan = search_problem(problem(mlp(12), cluster(8), constraints=pins))
    assert [stage.dp for stage in plan.stages] == [4, 1, 1, 2]


def test_nothing_is_offered_without_such_pins_or_without_devices() -> None:
    assert not list(pinned_choices(problem(mlp(6), cluster(8))))
    pins = ("pp=2", "stage 0 mesh dp_replicate=6", "stage 1 mesh dp_replicate=6")
    too_many = problem(mlp(6), cluster(8), constraints=pins)
    assert not list(pinned_choices(too_many))
    with pytest.raises(Infeasible):
        search_problem(too_many)
