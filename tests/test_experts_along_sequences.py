"""Experts along a sequence: ranks with parts of the same samples have experts of their own, to
which tokens travel on `cp`; against one process in float64."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ModelMesh, Plan
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from meshwright.testing.split_all import SPLIT_ALL
from tests.clipped_jobs import check_each_goes_on
from tests.traces import zoo_graph

CP2 = (("cp", 2),)
TRAVELS = "S(0,outer=8) S(0,outer=8) S(0,outer=8) S(0) S(0) -> S(0,outer=8)"
"""Tokens of eight samples, each cut along its sequence, go to where experts lie, and back."""
RUNS: dict[int, dict[str, tuple[ModelMesh, dict[str, Any]]]] = {
    3: {"uneven": ((("cp", 3),), {})},
    4: {
        "alone": ((("cp", 4),), {}),
        "parts on tp": ((*CP2, ("tp", 2)), {"zero": 1}),
        "replicas": (CP2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
        "recomputed": (CP2, {"dp_shard": 2, "zero": 1, "recompute": "full"}),
        "stages": (CP2, {"pp": 2, "zero": 2, "num_microbatches": 4}),
    },
}


@cache
def traced() -> Graph:
    return zoo_graph(CASES["mixtral"], 8)


def _plan(world: int, mesh: ModelMesh, choice: dict[str, Any]) -> Plan:
    problem = make_problem(traced(), Cluster.local(world), precision="fp64", optimizer="adam")
    problem.solved[mesh, ""] = solve_layouts(traced(), mesh, usual(mesh, SPLIT_ALL))
    return build_plan(problem, uniform_choice(problem, model=mesh, **choice))


def _strategy(plan: Plan, axis: str) -> str:
    (found,) = (ops for each in plan.layouts for op, ops in each.ops.items()
                if op.endswith("/experts"))  # fmt: skip
    return found[axis]


@pytest.mark.parametrize("world", RUNS)
def test_training_is_that_of_one_process(world: int) -> None:
    made = {name: _plan(world, *run) for name, run in RUNS[world].items()}
    for name, plan in made.items():
        assert _strategy(plan, "cp") == TRAVELS, name
    found = check_each_equal(CASES["mixtral"], [(plan, traced()) for plan in made.values()])
    for name, difference in zip(made, found, strict=True):
        assert difference.worst_of_both <= 1e-9, f"{name}: {difference}"


def test_halves_and_checkpoints_are_those_of_one_process(tmp_path: Path) -> None:
    """Tokens of one half are on their way while the other computes; what was saved goes on."""
    whole = _plan(4, CP2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2})
    stages = tuple(replace(stage, overlap="blocks") for stage in whole.stages)
    plans = {"halves": replace(whole, stages=stages), "alone": _plan(4, (("cp", 4),), {})}
    check_each_goes_on(CASES["mixtral"], plans, traced(), tmp_path)


def _pinned(world: int, *pins: str) -> Plan:
    asked = tuple(parse_constraint(f"{pin}") for pin in pins)
    cluster = Cluster.local(world)
    return search_problem(
        make_problem(traced(), cluster, precision="fp64", optimizer="adam", constraints=asked)
    )


def test_tokens_travel_on_two_axes() -> None:
    """To experts along the sequence, and inside of these to those of other samples' ranks."""
    experts = ("place *.experts.* cp=S(0)", "place *.experts.* ep=S(0,outer=2)")
    plan = _pinned(4, "cp=2", "ep=2", "zero=3", "samples=own", *experts)
    both = {"cp": TRAVELS, "ep": "S(0) S(0) S(0) S(0,outer=2) S(0,outer=2) -> S(0)"}
    layouts = tuple(
        replace(each, ops={
            op: {**axes, **both} if op.endswith("/experts") else axes
            for op, axes in each.ops.items()
        }) for each in plan.layouts
    )  # fmt: skip
    (found,) = check_each_equal(
        CASES["mixtral"], [(replace(plan, layouts=layouts, hash=""), traced())]
    )
    assert found.worst_of_both <= 1e-9, str(found)


def test_they_lie_there_if_it_is_asked_for() -> None:
    plan = _pinned(2, "cp=2", "place *.experts.* cp=S(0)")
    lies = [placed for each in plan.layouts for name, placed in each.parameters.items()
            if ".experts." in name]  # fmt: skip
    assert len(lies) == 2 and all(placed["cp"] == "S(0)" for placed in lies)
    others = [placed for each in plan.layouts for name, placed in each.parameters.items()
              if ".experts." not in name]  # fmt: skip
    assert others and not any("cp" in placed for placed in others)
