"""Clusters of several device types: the planner keeps its own rules, and how nodes are listed
decides nothing."""

from dataclasses import replace

import pytest

from benchmarks.attack.metamorphic import CHECKS, Instance, instance, solved
from benchmarks.mixed_devices import cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.verify import verify
from meshwright.planner.across.refine import neighbours
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.problem.candidates import Choice, StageChoice, build_plan
from meshwright.planner.problem.node_order import in_one_order
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.offers import TIE
from meshwright.planner.searchers.exhaustive import count
from tests.planner.chains import chain

LEAN = ("saved=none", "recompute=none", "schedule=one_f_one_b", "zero<=1")
"""What keeps searches short."""


def small(seed: int) -> Instance:
    return replace(instance(seed, layers=3, batch=4), pins=LEAN)


def mixed(seed: int = 0, *pins: str) -> Problem:
    given = instance(seed)
    return make_problem(given.graph, given.cluster, precision="fp32", constraints=pins)


def test_neighbours_keep_the_rules() -> None:
    """Shares are of a micro-batch of one size: with another number of them they are others."""
    problem = mixed()
    devices = problem.cluster.num_devices
    uneven = (problem.batch // 2 - devices + 1, *(1,) * (devices - 1))
    stage = StageChoice(
        start=0, stop=len(problem.graph.blocks), devices=tuple(range(devices)),
        dp_replicate=devices, shares=uneven,
    )  # fmt: skip
    choice = Choice(stages=(stage,), num_microbatches=2, schedule="one_f_one_b", num_ranks=1)
    found = list(neighbours(problem, choice, Treatments(problem), tight=True))
    assert {other.num_microbatches for other in found} >= {1, 2, 4}
    for other in found:
        plan = build_plan(problem, other)
        rules = {f.rule for f in verify(plan, problem.graph, problem.cluster)}
        assert rules <= {"memory"}, (other, rules)


@pytest.mark.parametrize("seed", [1, 4])
def test_what_holds_between_searches(seed: int) -> None:
    given = small(seed)
    free = solved(given)
    for name in ("rules", "order", "more"):
        assert not list(CHECKS[name](given, free, seed)), name


def test_no_pin_helps() -> None:
    given = small(3)
    free = solved(given)
    assert free and free.predicted
    for pin in ("num_microbatches=1", "num_microbatches=4", "pp=2", "zero=0"):
        pinned = solved(given, pin)
        assert pinned is None or pinned.predicted
        if pinned and pinned.predicted:
            assert pinned.predicted.step_s * (1 + TIE) >= free.predicted.step_s, pin


def test_a_plan_comes_back_to_the_nodes_that_were_given() -> None:
    problem = mixed(1)
    nodes = problem.cluster.nodes
    asked = in_one_order(replace(problem, cluster=replace(problem.cluster, nodes=nodes[::-1])))
    again = in_one_order(problem)
    assert asked.problem.cluster == again.problem.cluster
    names = asked.given.cluster.device_names
    moved = asked.problem.cluster.device_names
    if asked.ranks:
        assert [names[asked.ranks[rank]] for rank in range(len(names))] == list(moved)


def test_choices_of_many_nodes_are_counted_at_once() -> None:
    """Not by writing down all ways to share out 64 devices."""
    step = instance(0).graph
    large = cluster(("a100", "v100"))
    types = tuple(
        replace(device, name=name)
        for device, name in zip(large.device_types, ("fast", "slow"), strict=True)
    )
    nodes = tuple(
        replace(node, devices=tuple({"a100": "fast", "v100": "slow"}[d] for d in node.devices))
        for node in large.nodes
    )
    problem = make_problem(
        step, replace(large, device_types=types, nodes=nodes), precision="fp32",
        constraints=("num_microbatches=1", "pp=3"),
    )  # fmt: skip
    assert count(problem, 1000) > 1000


def test_a_profile_must_say_how_fast_each_device_type_is() -> None:
    with pytest.raises(PlanError, match="does not say how fast"):
        make_problem(chain(3, 8), instance(0).cluster, precision="fp32")
