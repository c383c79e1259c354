"""What is kept of a problem: nobody else's, not shared with another, gone with it."""

import gc
import weakref
from dataclasses import replace

from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.pins.constraints import Pin, freed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import meshes
from meshwright.planner.search.search import search_problem
from tests.planner.problems import TINY


def asked() -> Problem:
    return TINY["slow link"]()


def test_tables_list_no_cache_of_others() -> None:
    problem = asked()
    search_problem(problem, "ilp")
    found = {name for name, held in vars(problem.tables).items() if isinstance(held, dict)}
    # Facts of the graph and the cluster, which nobody adds to.
    assert {name for name in found if not name.startswith("_")} <= {
        "block_index", "devices", "hosts", "shared", "param_kinds",
    }  # fmt: skip


def test_two_problems_do_not_share() -> None:
    first, second = asked(), asked()
    assert first == second
    (one, *_), (other, *_) = meshes(first, 2, 4), meshes(second, 2, 4)
    assert one == other and one is not other
    assert next(iter(meshes(first, 2, 4))) is one


def test_other_constraints_have_their_own() -> None:
    first = asked()
    pinned = replace(first, constraints=freed(first.constraints, "zero", Pin("zero", 0)))
    assert pinned.memos is first.memos
    assert {mesh.zero for mesh in meshes(pinned, 2, 4)} == {0}
    assert {mesh.zero for mesh in meshes(first, 2, 4)} > {0}


def test_all_goes_with_the_problem() -> None:
    problem = asked()
    search_problem(problem, "ilp")
    lower_bound(problem, waits=False)
    held = weakref.ref(problem.memos), weakref.ref(problem.tables)
    del problem
    gc.collect()
    assert [ref() for ref in held] == [None, None]
