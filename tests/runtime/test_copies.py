"""Jobs whose blocks read copies of parameters: all of it in float64 is exact, and in narrower types
it equals one process that does the same."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES

EXACT = "copies64"
BATCH = 8


@cache
def traced(name: str, precision: str) -> Graph:
    case = CASES[name]
    return trace(case.model(), case.example(BATCH), case.loss_fn, precision=precision)


def planned(
    name: str, world: int, precision: str, sync: FormChoice | None = None, **choice: Any
) -> tuple[Plan, Graph]:
    graph = traced(name, precision)
    problem = make_problem(graph, Cluster.local(world), optimizer="adam")
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    assert plan.precision == precision
    stages = tuple(replace(stage, sync=sync) for stage in plan.stages)
    return replace(plan, stages=stages), graph


ONE = [{}, {"num_microbatches": 4}, {"recompute": "full"}]
FOUR = [
    {"dp_replicate": 4}, {"dp_replicate": 4, "num_microbatches": 2},
    {"dp_shard": 4, "zero": 1}, {"dp_shard": 4, "zero": 1, "num_microbatches": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "num_microbatches": 2},
    {"dp_shard": 4, "zero": 3}, {"dp_shard": 2, "zero": 3, "tp": 2, "num_microbatches": 2},
    {"pp": 2, "dp_shard": 2, "zero": 1, "num_microbatches": 4, "schedule": "zero_bubble"},
    {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "interleaved"},
]  # fmt: skip
DEAR = FormChoice(form="dear", settings={"bucket_bytes": 4096, "ahead": 2})


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_job_of_copies_equals_the_single_process(name: str) -> None:
    four: list[tuple[FormChoice | None, dict[str, Any]]] = [(None, choice) for choice in FOUR]
    four += [(DEAR, {"dp_shard": 4, "zero": 1}), (DEAR, {"dp_replicate": 4})]
    for world, choices in ((1, [(None, choice) for choice in ONE]), (4, four)):
        plans = [planned(name, world, EXACT, sync, **choice) for sync, choice in choices]
        found = zip(choices, check_each_equal(CASES[name], plans), strict=True)
        bad = {str(c): str(d) for c, d in found if not d.worst_of_both <= 1e-9}
        assert not bad
