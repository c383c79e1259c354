"""Constraints parse, print what parses again, refuse with the nearest, and are kept by plans."""

import pytest

from meshwright.ir.errors import PlanError
from meshwright.planner.candidates import build_plan, uniform_choice
from meshwright.planner.constraints import (
    Constraint,
    MemoryCap,
    OnStage,
    Pin,
    broken,
    memory_cap,
    parse_constraint,
    parse_constraints,
)
from meshwright.planner.search import search_problem
from tests.planner.problems import cluster, mlp, problem


@pytest.mark.parametrize(
    "text,parsed",
    [
        ("tp=2", Pin("tp", 2)),
        (" pp = 1 ", Pin("pp", 1)),
        ("zero=0", Pin("zero", 0)),
        ("prefetch=0", Pin("prefetch", 0)),
        ("recompute=none", Pin("recompute", "none")),
        ("schedule=gpipe", Pin("schedule", "gpipe")),
        ("block transformer.h.3 on stage 1", OnStage("transformer.h.3", 1)),
        ("memory<=60GB", MemoryCap(60 * 10**9)),
        ("memory <= 1.5GiB", MemoryCap(3 * 2**29)),
        (Pin("tp", 4), Pin("tp", 4)),
    ],
)
def test_parse(text: str | Constraint, parsed: Constraint) -> None:
    assert parse_constraint(text) == parsed
    assert parse_constraint(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text,says",
    [
        ("tpp=2", "nearest is 'tp'"),
        ("tp=0", "a whole number from 1"),
        ("tp=two", "a whole number from 1"),
        ("zero=4", "0, 1, 2 or 3"),
        ("schedule=gpip", "'gpipe'"),
        ("recompute=ful", "'full'"),
        ("memory<=60", "bytes quantity|not a text|write for example"),
        ("make it fast", "write for example tp=2"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse_constraint(text)


def test_blocks_must_exist() -> None:
    with pytest.raises(PlanError, match=r"no such block; nearest is \['layers.2'\]"):
        parse_constraints(("block layer.2 on stage 0",), mlp())


def test_order_and_repeats_do_not_matter() -> None:
    one = parse_constraints(("tp=2", "memory<=3GB", "pp=1", "tp=2"), mlp())
    assert one == parse_constraints(("pp=1", "memory<=3GB", "tp=2"), mlp())
    assert memory_cap(one) == 3 * 10**9


@pytest.mark.parametrize(
    "text,kept",
    [
        ("pp=2", True), ("pp=1", False), ("tp=1", True), ("tp=2", False), ("dp=1", True),
        ("zero=0", True), ("zero=1", False), ("prefetch=0", True),
        ("prefetch=1", False), ("num_microbatches=2", True), ("schedule=gpipe", True),
        ("schedule=one_f_one_b", False), ("recompute=none", True), ("recompute=full", False),
        ("block layers.2 on stage 1", True), ("block layers.0 on stage 1", False),
        ("block layers.0 on stage 7", False), ("memory<=1kB", True), ("dp_shard=2", False),
    ],
)  # fmt: skip
def test_kept_by_a_plan(text: str, kept: bool) -> None:
    asked = problem(mlp(), cluster(2))
    choice = uniform_choice(asked, pp=2, schedule="gpipe", num_microbatches=2, cuts=(1,))
    plan = build_plan(asked, choice)
    assert broken((parse_constraint(text),), plan, mlp()) == (
        () if kept else (parse_constraint(text),)
    )


def test_prefetch_is_searched_with_zero_3_alone() -> None:
    plan = search_problem(problem(mlp(), cluster(2), constraints=("prefetch=2",)))
    assert [(stage.zero, stage.prefetch) for stage in plan.stages] == [(3, 2)]
