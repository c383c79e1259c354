"""Every searcher on every tiny problem: legal plans, never better than the oracle, repeatable."""

from functools import cache
from importlib import import_module

import pytest

from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.ir.plan.verify import verify
from meshwright.planner.pins.constraints import broken
from meshwright.planner.search.offers import SEARCHERS
from meshwright.planner.search.search import search_problem
from tests.planner.problems import TINY

BASELINES = {
    name for name in SEARCHERS
    if hasattr(import_module(f"meshwright.planner.searchers.{name}"), "BASELINE")
}  # fmt: skip
"""Searchers of other systems, for comparison: legal and repeatable, but in a space of their own."""
BEYOND = {"tensor", "sharded", "placed", "tight"}
"""Problems that ask for what no baseline has."""


@cache
def solved(searcher: str, name: str) -> Plan:
    return search_problem(TINY[name](), searcher)


def value(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.peak_bytes if plan.objective == "memory" else plan.predicted.step_s


@pytest.mark.sampled
@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("name", TINY)
def test_plans_are_legal(searcher: str, name: str) -> None:
    if searcher in BASELINES and name in BEYOND:
        with pytest.raises(Infeasible):
            solved(searcher, name)
        return
    plan, problem = solved(searcher, name), TINY[name]()
    assert verify(plan, problem.graph, problem.cluster) == ()
    assert not broken(problem.constraints, plan, problem.graph)
    assert loads(dumps(plan)) == plan
    assert plan.world_size == problem.cluster.num_devices
    assert plan.evidence and plan.evidence.exhausted and plan.evidence.candidates > 0


@pytest.mark.parametrize("searcher", [name for name in SEARCHERS if name not in BASELINES])
@pytest.mark.parametrize("name", TINY)
def test_never_better_than_all_plans(searcher: str, name: str) -> None:
    plan, best = solved(searcher, name), solved("exhaustive", name)
    assert plan.predicted and plan.evidence
    assert value(plan) == pytest.approx(value(best), rel=1e-9)
    assert plan.evidence.gap is not None
    assert plan.evidence.bound_s <= solved("exhaustive", name).predicted.step_s  # type: ignore[union-attr]
    assert plan.predicted.step_s == pytest.approx(
        plan.evidence.bound_s * (1 + plan.evidence.gap), rel=1e-5
    )


@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("name", ["two devices", "placed", "traced"])
def test_same_inputs_same_bytes(searcher: str, name: str) -> None:
    if searcher in BASELINES and name in BEYOND:
        pytest.skip("a baseline does not have such plans")
    assert dumps(search_problem(TINY[name](), searcher)) == dumps(solved(searcher, name))
