"""Long chains of layers that all differ: fewer places to cut; gradients that move all at once."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.costmodel.cost_cache import CostTables
from meshwright.planner.across import run_classes as module
from meshwright.planner.across.run_classes import cuts, run_classes
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.search.search import search_problem
from tests.planner.layered import Layers, machines, problem


def layers(count: int) -> Layers:
    """All differ; every third border sends little."""
    return [(1.0 + i / 100, 10**5 if i % 3 else 10**3 + i, 10**5 + i) for i in range(count)]


def test_few_layers_may_be_cut_anywhere() -> None:
    found = run_classes(problem(layers(12), 8, machines(1, 2, 1e9, 1e9)))
    assert found.places.tolist() == list(range(13))
    assert len(found.start) == 12 * 13 // 2


def test_many_layers_are_cut_where_little_is_sent() -> None:
    given = problem(layers(210), 8, machines(1, 2, 1e9, 1e9))
    found = run_classes(given)
    places = found.places.tolist()
    assert places == sorted(cuts(given)) and places[0] == 0 and places[-1] == 210
    assert len(places) <= module.CUTS + 2 and max(np.diff(places)) <= 8
    small = [p for p in places[1:-1] if (p - 1) % 3 == 0]
    assert len(small) > 0.8 * len(places)
    assert ((found.index >= 0).sum(axis=1)[places[:-1]] > 0).all()


def test_fewer_places_hardly_cost_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(layers(30), 8, machines(1, 2, 1e9, 1e7), constraints=("pp=2",))
    whole = search_problem(given, "ilp")
    monkeypatch.setattr(module, "KINDS", 100)
    monkeypatch.setattr(module, "CUTS", 10)
    few = search_problem(
        problem(layers(30), 8, machines(1, 2, 1e9, 1e7), constraints=("pp=2",)), "ilp"
    )
    assert whole.predicted and few.predicted
    assert few.predicted.step_s <= 1.02 * whole.predicted.step_s


def test_gradients_that_move_all_at_once_hide_behind_nothing() -> None:
    given = problem([(10.0, 10, 3 * 10**7)] * 6, 8, machines(1, 2, 1e9, 1e9))
    tables = CostTables(given.graph, given.cluster, "fp32", bucket_bytes=2**62)
    late = replace(given, tables=tables)
    plans = [build_plan(p, uniform_choice(p, dp_replicate=2)) for p in (given, late)]
    own, whole = (plan.predicted.step_s for plan in plans if plan.predicted)
    moved = 6 * 3 * 10**7 / 1e9
    assert own < whole - 0.5 * moved
    assert whole == pytest.approx(6 * 4 * 10e-3 + moved, rel=0.02)
