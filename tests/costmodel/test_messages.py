"""Messages among replicas, row by row: their bytes are those of the traffic, and what is exposed is
by how much a step is longer for them."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.explain.detail import detail_of
from meshwright.costmodel.explain.messages import messages_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.detail import NEXT_FORWARD, SyncMessage
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.tools.report.contents import contents
from tests.form_files.small import graph

SIZES: dict[str, dict[str, int]] = {
    "zero0": {"dp_replicate": 4}, "zero1": {"dp_replicate": 2, "dp_shard": 2, "zero": 1},
    "zero2": {"dp_shard": 4, "zero": 2}, "zero3": {"dp_shard": 4, "zero": 3},
}  # fmt: skip


def problem(wire: float = 1e8) -> Problem:
    cluster = Cluster.preset("v100-16", num_nodes=4, devices_per_node=1)
    assert cluster.between_nodes
    between = replace(
        cluster.between_nodes, bandwidth_bytes_per_s=wire, latency_s=0.0, launch_s=0.0, curves=()
    )
    return make_problem(
        graph(), replace(cluster, between_nodes=between), precision="fp64", optimizer="sgd"
    )


def plan_of(
    of: Problem, sync: str = "", sizes: str = "zero0", micro: int = 2, **settings: Any
) -> Plan:
    choice = uniform_choice(of, num_microbatches=micro, **SIZES[sizes])
    plan = build_plan(of, choice, predict=False)
    form = FormChoice(form=sync, settings=settings) if sync else None
    return replace(plan, stages=(replace(plan.stages[0], sync=form),))


def sent(of: Problem, plan: Plan) -> tuple[SyncMessage, ...]:
    found = estimate_all(of.graph, of.cluster, plan, of.tables)
    return messages_of(of.tables, found.models[0], plan.num_microbatches)


def step_s(of: Problem, plan: Plan) -> float:
    return estimate_all(of.graph, of.cluster, plan, of.tables).prediction.step_s


FORMS: dict[str, dict[str, Any]] = {
    "zero0": {}, "zero1": {"sizes": "zero1"}, "zero2": {"sizes": "zero2"},
    "zero3": {"sizes": "zero3"}, "dear": {"sync": "dear"},
    "powersgd": {"sync": "powersgd", "rank": 2}, "sketch": {"sync": "sketch", "cells": 0.25},
    "dasgd": {"sync": "dasgd", "every": 4, "delay": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_their_bytes_are_those_of_the_traffic(name: str) -> None:
    of = problem()
    plan = plan_of(of, **FORMS[name])
    detail, messages = detail_of(of.tables, plan).stage(0), sent(of, plan)
    assert messages and {m.form for m in messages} == {name}
    assert detail.messages == (messages if plan.stages[0].sync else ())
    for purpose in ("gradients", "parameters"):
        own = [m for m in messages if m.what == purpose]
        traffic = [t for t in detail.traffic if t.purpose == purpose]
        assert sum(m.nbytes for m in own) == pytest.approx(sum(t.nbytes for t in traffic), abs=2)
        takes = sum(t.seconds for t in traffic)
        assert sum(m.seconds for m in own) == pytest.approx(takes, rel=1e-5)


def test_what_is_gathered_before_blocks_is_one_row() -> None:
    """Before forwards and backwards of two micro-batches, from three others of four."""
    of = problem()
    (gathered,) = [m for m in sent(of, plan_of(of, sizes="zero3")) if m.what == "parameters"]
    assert gathered.when == "before blocks run" and gathered.primitive == "all_gather"
    assert gathered.nbytes == pytest.approx(2 * 2 * 3 / 4 * graph().parameter_bytes, abs=1)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_exposed_makes_the_step_longer(name: str) -> None:
    """Of a form that sends one message, by all of the difference to a wire that takes no time; of
    others by no more than that."""
    of, free = problem(1e6), problem(1e15)
    plan = plan_of(of, **FORMS[name])
    found = sent(of, plan)
    longer_s = step_s(of, plan) - step_s(free, plan)
    exposed = [m.exposed_s for m in found]
    assert all(0 <= x for x in exposed) and 0 < sum(exposed)
    assert max(exposed) <= 1.02 * longer_s
    if len(found) == 1:
        assert sum(exposed) == pytest.approx(longer_s, rel=0.02)


def test_averages_are_hidden_as_long_as_they_fit() -> None:
    """In the steps until they are waited for."""
    of = problem(3e9)
    exposed = []
    for delay in (0, 1, 2, 3):
        (one,) = sent(of, plan_of(of, "dasgd", every=4, delay=delay))
        assert "every 4 steps" in one.when
        assert (f"{delay} step" in one.when) == bool(delay)
        exposed.append(one.exposed_s)
    assert exposed[0] > 0 and exposed[1:] == [0, 0, 0]
    of = problem(1e6)
    slow = [sent(of, plan_of(of, "dasgd", every=4, delay=d))[0].exposed_s for d in (0, 1, 3)]
    assert slow == sorted(slow, reverse=True) and slow[2] > 0


def test_groups_of_parameters_have_their_own() -> None:
    of = problem()
    plan = plan_of(of)
    own = ParameterChoice(sync=FormChoice(form="powersgd", settings={"rank": 1, "gain": 1.0}))
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter={"layers.1.*": own}),))
    found = sent(of, plan)
    assert [(m.form, m.when) for m in found] == [
        ("zero0", "under the last backward"), ("powersgd", "under the last backward"),
        ("powersgd", "at the step's end"),
    ]  # fmt: skip


def test_the_plan_and_its_report_show_them() -> None:
    of = problem()
    late = build_plan(of, uniform_choice(of, num_microbatches=2, **SIZES["zero0"]))
    assert late.predicted and "Messages among replicas" not in str(late), "no form is named"
    plan = plan_of(of, "dear")
    found = estimate_all(of.graph, of.cluster, plan, of.tables).prediction
    plan = replace(plan, predicted=replace(found, detail=detail_of(of.tables, plan)))
    text = str(plan)
    assert "Messages among replicas" in text and NEXT_FORWARD in text
    assert "hides" in text and "reduce_scatter" in text
    assert loads(dumps(plan)).predicted == plan.predicted
    rows = contents(plan)["messages"]
    assert [row["primitive"] for row in rows] == ["reduce_scatter", "all_gather"]
    assert rows[0]["stages"] == [0] and rows[1]["when"] == NEXT_FORWARD
    plan = plan_of(of, "powersgd")
    plan = replace(plan, predicted=replace(found, detail=detail_of(of.tables, plan)))
    assert "of its gathers under" not in str(plan), "it has none"


def test_a_stage_alone_sends_none() -> None:
    of = make_problem(graph(), Cluster.local(1), precision="fp64", optimizer="sgd")
    plan = build_plan(of, uniform_choice(of), predict=False)
    assert sent(of, plan) == ()
