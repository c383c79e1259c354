"""Constraints parse, print what parses again, refuse with the nearest, and are kept by plans."""

from dataclasses import replace

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.layout.layout import RP, Placement, R, Shard
from meshwright.ir.plan.plan import BlockLayout, ModelMesh, Plan
from meshwright.planner.pins.constraints import (
    NO_RULES,
    Constraint,
    MemoryCap,
    OnStage,
    Pin,
    Placed,
    Scope,
    StageDevices,
    StageMesh,
    StageShares,
    StepCap,
    allowed,
    asked_meshes,
    broken,
    is_scoped,
    memory_cap,
    mesh_allowed,
    of_stage,
    parse_constraint,
    parse_constraints,
    pinned,
    placement_rules,
    stage_of_block,
)
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.search.search import search_problem
from tests.planner.problems import cluster, mlp, problem, traced


@pytest.mark.parametrize(
    "text,parsed",
    [
        ("tp=2", Pin("tp", 2)),
        (" pp = 1 ", Pin("pp", 1)),
        ("zero=0", Pin("zero", 0)),
        ("prefetch=0", Pin("prefetch", 0)),
        ("recompute=none", Pin("recompute", "none")),
        ("schedule=gpipe", Pin("schedule", "gpipe")),
        ("tp<=4", Pin("tp", 4, "<=")),
        ("num_microbatches >= 8", Pin("num_microbatches", 8, ">=")),
        ("pp in 4, 1,2", Pin("pp", (1, 2, 4), "in")),
        ("tp_row=2", Pin("tp_row", 2)),
        ("cp<=8", Pin("cp", 8, "<=")),
        ("stage 1 zero=3", Pin("zero", 3, scope=Scope(stage=1))),
        ("block h.* recompute=full", Pin("recompute", "full", scope=Scope(block="h.*"))),
        ("block h.* layout=h.* tp2", Pin("layout", "h.* tp2", scope=Scope(block="h.*"))),
        ("stage 0 device_type in a,b", Pin("device_type", ("a", "b"), "in", Scope(stage=0))),
        ("stage 2 devices 0-3,8,10-11", StageDevices(2, (0, 1, 2, 3, 8, 10, 11))),
        ("stage 2 devices 3,2", StageDevices(2, (3, 2))),
        ("stage 1 mesh tp=2, dp_shard=3", StageMesh(1, (("dp_shard", 3), ("tp", 2)))),
        ("stage 0 shares 3,1", StageShares(0, (3, 1))),
        ("place h.*.attn tp=R", Placed("h.*.attn", "tp", "R")),
        ("place *.c_fc.weight tp_col=S(1)", Placed("*.c_fc.weight", "tp_col", "S(1)")),
        ("place head model=S", Placed("head", "model", "S")),
        ("block transformer.h.3 on stage 1", OnStage("transformer.h.3", 1)),
        ("block h.3 starts stage 1", OnStage("h.3", 1, starts=True)),
        ("memory<=60GB", MemoryCap(60 * 10**9)),
        ("memory <= 1.5GiB", MemoryCap(3 * 2**29)),
        ("step<=1.2s", StepCap(1.2)),
        ("step<=900ms", StepCap(0.9)),
        ("step<=0.0015363249999999998s", StepCap(0.0015363249999999998)),
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
        (f"tp={'9' * 6000}", "a number of 6000 digits; at most 18"),
        (f"stage 0 devices 0-{10**17}", "no cluster has more"),
        ("zero=4", "0, 1, 2 or 3"),
        ("zero<=4", "0, 1, 2 or 3"),
        ("schedule=gpip", "'gpipe'"),
        ("schedule<=gpipe", "a word has no order"),
        ("pp in 1,x", "a whole number from 1"),
        ("recompute=ful", "'full'"),
        ("saved=ofload", "'offload'"),
        ("saved in none,offload", "saved is pinned to one word; write saved=none"),
        ("stage 0 saved=offload", "a decision of the whole plan; write saved=offload"),
        ("memory<=60", "bytes quantity|not a text|write for example"),
        ("step<=0s", "must be positive"),
        ("step<=fast", "time quantity"),
        ("stage 0 pp=2", "a decision of the whole plan; write pp=2"),
        ("block h.* schedule=gpipe", "a decision of the whole plan"),
        ("layout=x", "a layout is of blocks"),
        ("devices 0-3", "write 'stage 0 devices 0-3'"),
        ("stage 0 devices 3-0", "ranks and ranges"),
        ("stage 0 devices 0-3,2", "named twice"),
        ("stage 0 mesh tpp=2", "nearest is 'tp'"),
        ("stage 0 mesh tp=2,tp=2", "named twice"),
        ("stage 0 mesh tp=0", "a whole number from 1"),
        ("stage 0 shares 3,0", "whole numbers from 1"),
        ("place h.* dp=R", "no model axis 'dp'"),
        ("place h.* tp=P", "nearest is R"),
        ("place h.* tp=T(1)", "is not one of"),
        ("make it fast", "write for example tp=2"),
        ("stage 0 on stage 1", "write for example"),
    ],
)
def test_refuses(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse_constraint(text)


@pytest.mark.parametrize(
    "text,says",
    [
        ("block layer.2 on stage 0", "no such block; nearest is 'layers.2'"),
        ("block layer.* zero=1", "no such block; nearest is 'layers"),
        ("place layer.* tp=R", "no such parameter; nearest is 'layers"),
        ("place * tp=S(2)", r"has \d dims; nearest is tp=S\(\d\)"),
        ("stage 0 devices 0-7", "are 0 to 1"),
        ("device_type=toyy", "nearest is 'toy'"),
    ],
)
def test_names_must_exist(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse_constraints((text,), mlp(), cluster(2))


def test_order_and_repeats_do_not_matter() -> None:
    one = parse_constraints(("tp=2", "memory<=3GB", "pp=1", "tp=2"), mlp())
    assert one == parse_constraints(("pp=1", "memory<=3GB", "tp=2"), mlp())
    assert memory_cap(one) == 3 * 10**9


def parsed(*texts: str) -> tuple[Constraint, ...]:
    return parse_constraints(texts, mlp(), cluster(4))


def test_ranges_and_lists_leave_what_they_admit() -> None:
    given = parsed("tp<=4", "tp>=2", "pp in 1,2,4", "zero=3", "stage 1 dp=2")
    assert allowed(given, "tp", range(1, 9)) == (2, 3, 4)
    assert allowed(given, "pp", range(1, 9)) == (1, 2, 4)
    assert allowed(given, "dp", range(1, 4)) == (1, 2, 3)  # that pin is of one stage
    assert pinned(given, "zero") == 3 and pinned(given, "tp") is None
    assert pinned(given, "dp") is None
    assert is_scoped(given) and not is_scoped(given[:0])


def test_the_pins_of_one_stage() -> None:
    given = parsed("stage 1 tp=2", "block layers.0 zero=3", "stage 0 mesh dp_shard=2", "pp=2")
    first, second = of_stage(given, 0, ("layers.0",)), of_stage(given, 1, ("layers.1", "layers.2"))
    assert allowed(first, "tp", (1, 2)) == (1,) and allowed(second, "tp", (1, 2)) == (2,)
    assert pinned(first, "zero") == 3 and pinned(second, "zero") is None
    assert mesh_allowed(first, 1, 2, ()) and not mesh_allowed(first, 2, 1, ())
    assert mesh_allowed(second, 2, 1, (("tp", 2),)) and not mesh_allowed(second, 2, 1, ())


def test_a_stage_that_splits_a_parameter_has_the_axis() -> None:
    given = parsed("place layers.1.fc1.weight tp=S(0)")
    assert is_scoped(given)
    assert allowed(of_stage(given, 0, ("layers.0",)), "tp", (1, 2, 4)) == (1, 2, 4)
    assert allowed(of_stage(given, 0, ("layers.0", "layers.1")), "tp", (1, 2, 4)) == (2, 4)
    whole = parsed("place layers.1 model=R")
    assert not is_scoped(whole) and allowed(of_stage(whole, 0, ("layers.1",)), "model", (1, 2))


def test_meshes_that_are_asked_for_by_name() -> None:
    given = parsed("tp_row=2", "stage 0 tp_col=4", "stage 1 mesh dp_shard=2,tp=3", "tp_depth<=2")
    assert asked_meshes(given) == (
        (("tp", 3),),
        (("tp_row", 2),),
        (("tp_row", 2), ("tp_col", 4)),
    )
    three = parsed("model=4")
    assert mesh_allowed(three, 1, 1, (("tp_row", 2), ("tp_col", 2)))
    assert not mesh_allowed(three, 1, 1, (("tp", 2),))


def test_blocks_and_stages() -> None:
    graph = mlp()
    assert stage_of_block(parsed("block layers.* on stage 0"), graph) == {0: 0, 1: 0, 2: 0}
    assert stage_of_block(parsed("block layers.2 starts stage 1"), graph) == {1: 0, 2: 1}
    assert stage_of_block(parsed("block layers.0 starts stage 0"), graph) == {0: 0}


def plan_of(*, meshes: tuple[dict[str, int], ...] = ()) -> Plan:
    """Two stages, the second with its blocks recomputed; meshes as told."""
    asked = problem(mlp(), cluster(2))
    choice = uniform_choice(asked, pp=2, schedule="gpipe", num_microbatches=2, cuts=(1,))
    plan = build_plan(asked, choice)
    last = replace(plan.stages[1], recompute={"layers.2": "full"})
    stages = [plan.stages[0], last]
    for i, mesh in enumerate(meshes):
        stages[i] = replace(stages[i], mesh=mesh)
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize(
    "text,kept",
    [
        ("pp=2", True), ("pp=1", False), ("tp=1", True), ("tp=2", False), ("dp=1", True),
        ("zero=0", True), ("zero=1", False), ("prefetch=0", True), ("prefetch<=2", True),
        ("prefetch=1", False), ("num_microbatches=2", True), ("schedule=gpipe", True),
        ("schedule=one_f_one_b", False), ("recompute=none", False), ("recompute=full", False),
        ("stage 1 recompute=full", True), ("stage 0 recompute=none", True),
        ("block layers.2 recompute=full", True), ("block layers.1 recompute=full", False),
        ("block layers.* recompute=none", False), ("pp in 1,2", True), ("pp in 1,3", False),
        ("num_microbatches>=3", False), ("tp<=1", True), ("cp=1", True), ("tp_row=2", False),
        ("model=1", True), ("stage 1 dp<=4", True), ("stage 7 dp=1", False),
        ("block layers.2 on stage 1", True), ("block layers.0 on stage 1", False),
        ("block layers.0 on stage 7", False), ("block layers.1 starts stage 1", True),
        ("block layers.2 starts stage 1", False), ("block layers.* on stage 1", False),
        ("stage 0 devices 0", True), ("stage 0 devices 1", False), ("stage 3 devices 1", False),
        ("stage 0 mesh dp_shard=1", True), ("stage 0 mesh tp=2", False),
        ("stage 0 shares 4", True), ("stage 0 shares 3", False), ("device_type=toy", True),
        ("memory<=1kB", True), ("dp_shard=2", False), ("step<=1000s", True), ("step<=1ns", False),
        ("place layers.0 tp=R", True), ("place layers.0 model=R", True),
        ("place layers.0 model=S", False),
    ],
)  # fmt: skip
def test_kept_by_a_plan(text: str, kept: bool) -> None:
    given = parse_constraints((text,), mlp(), cluster(2))
    assert broken(given, plan_of(), mlp()) == (() if kept else given)


def test_layouts_by_name() -> None:
    plan = plan_of()
    name = plan.stages[0].layouts["layers.*"]
    kept = parse_constraints((f"block layers.1 layout={name}",), mlp())
    assert not broken(kept, plan, mlp())
    assert broken(parse_constraints(("block layers.1 layout=other",), mlp()), plan, mlp())


@pytest.mark.parametrize(
    "text,kept",
    [
        ("place *.weight tp=S(0)", True), ("place *.weight tp=S(1)", False),
        ("place *.weight tp=S", True), ("place *.weight tp=R", False),
        ("place *.weight model=S", True), ("place *.weight model=R", False),
        ("place *.weight tp=S(0,outer=2)", True), ("place *.weight tp=S(0,outer=4)", False),
        ("place *.weight cp=R", True), ("place *.weight cp=S", False),
    ],
)  # fmt: skip
def test_where_parameters_lie(text: str, kept: bool) -> None:
    graph, plan = mlp(), plan_of(meshes=({"tp": 2}, {"tp": 2}))
    split = {"tp": "S(0,outer=2)"}

    def lay(layout: BlockLayout) -> BlockLayout:
        keys = {key: split for key in layout.parameters if key.endswith("weight")}
        return replace(layout, parameters=keys)

    plan = replace(plan, layouts=tuple(map(lay, plan.layouts)))
    given = parse_constraints((text,), graph)
    assert broken(given, plan, graph) == (() if kept else given)


def weight(layer: int) -> str:
    return next(t.name for t in mlp().parameters if t.fqn == f"layers.{layer}.fc1.weight")


TP, TWO = (("tp", 2),), (("tp_row", 2), ("tp_col", 2))
ONE = tuple((p,) for p in (R, RP, Shard(0), Shard(1), Shard(1, 3)))
PAIRS = ((R, R), (R, Shard(0)), (Shard(0), R), (Shard(1), Shard(0)), (RP, RP))


@pytest.mark.parametrize(
    "text,mesh,given,left",
    [
        ("place *.fc1.weight tp=R", TP, ONE, (0, 1)),
        ("place *.fc1.weight tp=S", TP, ONE, (2, 3, 4)),
        ("place *.fc1.weight tp=S(1)", TP, ONE, (3, 4)),
        ("place *.fc1.weight tp=S(1,outer=3)", TP, ONE, (4,)),
        ("place *.fc1.weight cp=R", TP, ONE, (0, 1, 2, 3, 4)),
        ("place *.fc1.weight model=S", TP, ONE, (2, 3, 4)),
        ("place *.fc1.weight model=S", TWO, PAIRS, (1, 2, 3)),
        ("place *.fc1.weight model=S(0)", TWO, PAIRS, (1, 2, 3)),
        ("place *.fc1.weight tp_row=S(1)", TWO, PAIRS, (3,)),
        ("place *.fc1.weight model=R", TWO, PAIRS, (0, 4)),
        (
            "place *.fc1.weight tp=S(0,inner=5)",
            TP,
            ONE,
            (0, 1, 2, 3, 4),
        ),  # none: the plan is judged
    ],
)
def test_places_that_a_block_may_use(
    text: str, mesh: ModelMesh, given: tuple[tuple[Placement, ...], ...], left: tuple[int, ...]
) -> None:
    rules = placement_rules(parse_constraints((text,), mlp()), mlp())
    assert rules.places(weight(0), mesh, given) == tuple(given[i] for i in left)
    assert NO_RULES.places(weight(0), mesh, given) == given


def test_equal_blocks_share_what_is_asked_of_one() -> None:
    rules = placement_rules(parsed("place layers.1.fc1.weight tp=S(0)"), mlp())
    assert rules.places(weight(2), TP, ONE) == ((Shard(0),),)
    with pytest.raises(PlanError, match="equal blocks share one layout"):
        placement_rules(parsed("place layers.1.fc1 model=R", "place layers.2.fc1 tp=S"), mlp())
    with pytest.raises(PlanError, match="must agree"):
        placement_rules(parsed("place *.fc1.weight tp=S(1)", "place *.fc1.weight tp=S(0)"), mlp())
    both = placement_rules(parsed("place *.fc1.weight tp=S", "place *.fc1.weight tp=S(0)"), mlp())
    assert both.places(weight(0), TP, ONE) == ((Shard(0),),)


def test_a_tied_parameter_has_all_its_names() -> None:
    graph = traced("gpt2")
    tied = graph.tied[0]
    for path in tied:
        rules = placement_rules(parse_constraints((f"place {path} tp=R",), graph), graph)
        assert set(rules.of) == {t.name for t in graph.parameters if t.fqn == tied[0]}


def test_prefetch_is_searched_with_zero_3_alone() -> None:
    plan = search_problem(problem(mlp(), cluster(2), constraints=("prefetch=2",)))
    assert [(stage.zero, stage.prefetch) for stage in plan.stages] == [(3, 2)]
