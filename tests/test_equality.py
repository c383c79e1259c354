"""A parallel run equals the single process: every model of the zoo under every kind of plan.

In float64, the loss of each of 3 Adam steps and every parameter after them, to 1e-9. Each model
runs under a third of the plans of each size, each under another third; `make test-all` runs all.
"""

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import BlockLayout, Plan
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equal_plans import LATE, PLANS, Case, equal_plan
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from meshwright.testing.networks import ResNet50
from meshwright.testing.split_all import split_all
from tests.sampled import in_turn
from tests.traces import zoo_graph

MODELS = CASES | {
    # All kinds of ResNet-50's blocks, 6 of its 16: whole it takes as long as all other models.
    "resnet50": replace(CASES["resnet50"], build=partial(ResNet50, depths=(2, 2, 1, 1)))
}


@cache
def traced(name: str, batch: int) -> Graph:
    case = MODELS[name]
    return zoo_graph(case, batch)


@cache
def split(name: str, batch: int, tp: int) -> tuple[BlockLayout, ...]:
    return split_all(traced(name, batch), tp)


WORLDS = sorted({kind.world for kind in PLANS.values()})


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model_name", MODELS)
def test_parallel_runs_equal_the_single_process(model_name: str, world: int) -> None:
    """All plans for as many ranks, in the same processes: forking them takes longer than a plan."""
    names = _picked_for(model_name, world)
    planned = [planned_for(model_name, PLANS[name]) for name in names]
    found = dict(zip(names, check_each_equal(MODELS[model_name], planned), strict=True))
    bad = {n: str(d) for n, d in found.items() if not (d.loss <= 1e-9 and d.parameters <= 1e-9)}
    assert not bad


def _picked_for(model_name: str, world: int) -> tuple[str, ...]:
    names = (name for name, kind in PLANS.items() if kind.world == world)
    return in_turn(names, list(MODELS).index(model_name))


def test_every_plan_runs_with_some_models() -> None:
    runs = Counter(name for model in MODELS for n in WORLDS for name in _picked_for(model, n))
    assert set(runs) == set(PLANS) and min(runs.values()) > 2, runs


def planned_for(model_name: str, kind: Case) -> tuple[Plan, Graph]:
    graph = traced(model_name, kind.batch)
    problem = make_problem(graph, Cluster.local(kind.world), precision="fp64", optimizer="adam")
    return equal_plan(problem, kind, partial(split, model_name, kind.batch)), graph


@pytest.mark.sampled
@pytest.mark.parametrize("model_name", ["gpt2", "t5", "vgg19"])
def test_late_gathers_equal_the_single_process(model_name: str) -> None:
    planned = [planned_for(model_name, kind) for kind in LATE.values()]
    found = dict(zip(LATE, check_each_equal(MODELS[model_name], planned), strict=True))
    bad = {n: str(d) for n, d in found.items() if not (d.loss <= 1e-9 and d.parameters <= 1e-9)}
    assert not bad
