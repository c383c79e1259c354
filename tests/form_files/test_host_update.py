"""The optimizer's state on the host, and its step there."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.forms.host_link import shaped
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from tests.form_files.small import difference, graph

HOST = FormChoice(form="update_on_host")
SHAPE = 200e6
"""Bytes per second: copies of the small model take a part of a millisecond."""


def problem(ranks: int, optimizer: str = "adamw") -> Problem:
    return make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer)


def on_host(made: Problem, store: FormChoice = HOST, **sizes: Any) -> Plan:
    plan = build_plan(made, uniform_choice(made, **sizes), predict=False)
    return replace(plan, stages=tuple(replace(stage, store=store) for stage in plan.stages))


ALONE: list[dict[str, Any]] = [{}, {"num_microbatches": 4}]
SHARED: list[dict[str, Any]] = [
    {"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2, "num_microbatches": 2},
    {"tp": 2}, {"pp": 2, "num_microbatches": 2},
]


@pytest.mark.parametrize("sizes", ALONE)
@pytest.mark.parametrize("rate", [None, SHAPE])
def test_one_rank_trains_as_one_process(sizes, rate) -> None:
    with shaped(rate):
        assert difference(on_host(problem(1), **sizes)) <= 1e-10


@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_ranks_train_as_one_process(sizes) -> None:
    with shaped(SHAPE):
        assert difference(on_host(problem(2), **sizes)) <= 1e-10
