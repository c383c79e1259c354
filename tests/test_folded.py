"""Axes that are one with replicas for parameters that lie whole on them, against one process in
float64: a mixture's dense part over dp x cp x ep, its experts over dp x cp."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.costmodel.comm.volume import replica_sends
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.costmodel.stage.stage_model import stage_model
from meshwright.forms.folding import stage_of, views_in
from meshwright.forms.retention import KEEP
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.folded import folded, folds_of
from meshwright.ir.plan.lines import stage_lines
from meshwright.ir.plan.plan import FormChoice, ModelMesh, ParameterChoice, Plan, Stage
from meshwright.ir.plan.summed import summed_axes
from meshwright.ir.trace.trace import trace
from meshwright.planner.bounds.bound import relaxed
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.space import Mesh
from meshwright.planner.search.search import search_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import LEARNING_RATE, check_each_equal
from meshwright.testing.models import CASES, ModelCase
from meshwright.testing.spawn import run_ranks
from tests.clipped_jobs import check_each_goes_on
from tests.codegen.quick import QUICK
from tests.traces import zoo_graph

EP2, EP4, CP2 = (("ep", 2),), (("ep", 4),), (("cp", 2),)
ON_FOUR: dict[str, tuple[ModelMesh, dict[str, Any]]] = {
    "zero0": (EP2, {"dp_replicate": 2, "zero": 0}),
    "zero1": (EP2, {"dp_shard": 2, "zero": 1}),
    "zero2": (EP2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    "zero3": (EP2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
    "copies": (EP2, {"dp_replicate": 2, "zero": 3}),
    "ep alone": (EP4, {"zero": 2, "num_microbatches": 2}),
    "cp alone": (CP2, {"dp_replicate": 2, "zero": 3}),
    "cp and ep": ((*CP2, *EP2), {"zero": 3}),
    "ep and tp": ((*EP2, ("tp", 2)), {"zero": 1}),
    "stages": (EP2, {"pp": 2, "zero": 3, "num_microbatches": 2}),
    "ahead": (EP4, {"zero": 3, "num_microbatches": 2, "prefetch": 1}),
}
ON_EIGHT: dict[str, tuple[ModelMesh, dict[str, Any]]] = {
    "cp, ep and copies": ((*CP2, *EP2), {"dp_replicate": 2, "zero": 3, "num_microbatches": 2}),
    "stages": ((*EP2, ("tp", 2)), {"pp": 2, "zero": 2, "num_microbatches": 2}),
}
EP3: dict[str, tuple[ModelMesh, dict[str, Any]]] = {"uneven": ((("ep", 3),), {"zero": 3})}


@cache
def traced() -> Graph:
    case = CASES["mixtral"]
    return zoo_graph(case, 8)


def _problem(graph: Graph, world: int, mesh: ModelMesh) -> Problem:
    problem = make_problem(graph, Cluster.local(world), precision="fp64", optimizer="adam")
    problem.solved[mesh, ""] = solve_layouts(graph, mesh, usual(mesh, QUICK))
    return problem


def _plan(world: int, mesh: ModelMesh, choice: dict[str, Any], *, predict: bool = False) -> Plan:
    problem = _problem(traced(), world, mesh)
    said = {name: value for name, value in choice.items() if name != "prefetch"}
    chosen = uniform_choice(problem, model=mesh, **said)
    ahead = choice.get("prefetch", 0)
    stages = tuple(replace(stage, prefetch=ahead) for stage in chosen.stages)
    plan = build_plan(problem, replace(chosen, stages=stages), predict=predict)
    assert all(stage.prefetch == ahead for stage in plan.stages)
    return plan


@pytest.mark.sampled
@pytest.mark.parametrize(("world", "plans"), [(4, ON_FOUR), (8, ON_EIGHT), (3, EP3)])
def test_training_is_that_of_one_process(
    world: int, plans: dict[str, tuple[ModelMesh, dict[str, Any]]]
) -> None:
    made = {name: _plan(world, mesh, choice) for name, (mesh, choice) in plans.items()}
    for name, plan in made.items():
        views = [view for i in range(len(plan.stages)) for view in views_in(plan, traced(), i)]
        assert any(view.dp > plan.stages[0].dp for view in views), name
    found = check_each_equal(CASES["mixtral"], [(plan, traced()) for plan in made.values()])
    for name, difference in zip(made, found, strict=True):
        assert difference.worst_of_both <= 1e-9, f"{name}: {difference}"


def _tied() -> nn.Module:
    """Its head is the table, and a part is frozen."""
    model = CASES["mixtral"].model()
    model.lm_head.weight = model.model.embed_tokens.weight
    for name, param in model.named_parameters():
        param.requires_grad_(not ("q_proj" in name or "layers.0.mlp.experts.down" in name))
    return model


def test_what_a_plan_says_of_some_parameters_and_stages_share() -> None:
    """Tied to another stage, frozen, split otherwise than the rest, or sent late."""
    case = ModelCase("tied", _tied, CASES["mixtral"].batch)
    graph = trace(case.model(), case.example(8))
    problem = _problem(graph, 4, EP2)
    said = {"*experts*": ParameterChoice(zero=1), "*norm*": ParameterChoice(zero=0)}
    late = FormChoice(form="dear", settings={})
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"pp": 2, "zero": 2, "num_microbatches": 2}, {}),
        ({"pp": 2, "zero": 0, "num_microbatches": 2}, {}),
        ({"dp_shard": 2, "zero": 3}, {"by_parameter": said}),
        ({"dp_shard": 2, "zero": 1}, {"sync": late}),
    ]
    plans = []
    for choice, more in asked:
        chosen = uniform_choice(problem, model=EP2, **choice)
        plan = build_plan(problem, chosen, predict=False)
        plans.append(replace(plan, stages=tuple(replace(s, **more) for s in plan.stages)))
        views = [view for i in range(len(plan.stages)) for view in views_in(plan, graph, i)]
        assert any(view.dp > plan.stages[0].dp for view in views), choice
    found = check_each_equal(case, [(plan, graph) for plan in plans])
    for choice, difference in zip(asked, found, strict=True):
        assert difference.worst_of_both <= 1e-9, f"{choice}: {difference}"


@pytest.mark.parametrize("name", ["zero0", "zero1", "copies", "ep alone", "cp and ep"])
def test_gradients_travel_along_the_line_of_their_parameters(name: str) -> None:
    """And along no axis again that is folded."""
    mesh, choice = ON_FOUR[name]
    problem = _problem(traced(), 4, mesh)
    plan = _plan(4, mesh, choice)
    costs = stage_costs(problem.tables, plan, 0)
    model = stage_model(problem.tables, plan, 0, costs)
    told = sum(
        one.nbytes
        for _, send, messages in replica_sends(model.sync, 1) if send.what == "gradients"
        for one in messages
    )  # fmt: skip
    sums, wanted = summed_axes(plan, traced(), 0), 0.0
    for x in traced().parameters:
        view = stage_of(plan.stages[0], x.fqn, sums)
        ring = {axis: (n - 1) / n for axis, n in view.data_axes.items()}
        held = costs.cost.params[x.name]
        wanted += held * (
            ring["dp_shard"] + 2 * ring["dp_replicate"] / view.mesh["dp_shard"]
            if view.is_sharded else 2 * ring["dp"]
        )  # fmt: skip
    assert told == pytest.approx(wanted)
    assert sum(sum(sizes) for _, sizes, _ in model.summed) == 0


@pytest.mark.parametrize("name", ["zero1", "zero3", "ep alone", "cp and ep"])
def test_state_is_shared_by_all_ranks(name: str) -> None:
    """Each of four ranks has a quarter: the dense part is shared by all, experts are split over
    `ep` and shared over what is left. All ranks of a replica look tokens up alike here, so that
    their gradients of the embedding are one, which replicas alone share."""
    plan = _plan(4, *ON_FOUR[name], predict=True)
    assert plan.predicted is not None
    (stage,) = plan.predicted.stages
    sizes = {t.fqn: t.nbytes for t in traced().parameters}
    table = sizes.pop("model.embed_tokens.weight")
    alone = table / plan.stages[0].mesh["dp_shard"]
    assert "ep" not in summed_axes(plan, traced(), 0).get("model.embed_tokens.weight", ())
    assert stage.memory.optimizer_bytes == pytest.approx(
        2 * (alone + sum(sizes.values()) / 4), rel=0.01
    )


@pytest.mark.parametrize("name", ["zero1", "copies", "ep alone", "cp and ep"])
def test_bounds_and_tables_hold_what_a_rank_does(name: str) -> None:
    """Parameters, and what the optimizer keeps, of all blocks under one micro-batch."""
    model, choice = ON_FOUR[name]
    problem = _problem(traced(), 4, model)
    plan = _plan(4, model, choice | {"num_microbatches": 1}, predict=True)
    relaxation = relaxed(problem)
    (stage,) = plan.stages
    mesh = Mesh(stage.mesh["dp_replicate"], stage.mesh["dp_shard"], model, stage.zero)
    case = relaxation.tables.case(0, mesh, 1)
    rates = relaxation.rates
    held = float(rates.steady([case], 1).state_bytes[0] @ rates.counts)
    sums, sizes = summed_axes(plan, traced(), 0), rates.runs.block_costs(case.at)
    local = {
        traced().tensors[tensor].fqn: nbytes
        for block, cost in zip(traced().blocks, sizes, strict=True)
        for tensor, nbytes in zip(block.params, cost.param_bytes, strict=True)
    }
    views = {path: stage_of(stage, path, sums) for path in local}
    wanted = sum(
        nbytes * (1 / shards if view.zero == 3 and shards > 1 else 1) + 2 * nbytes / shards
        for path, nbytes in local.items()
        for view in [views[path]] for shards in [view.mesh["dp_shard"]]
    )  # fmt: skip
    assert held == pytest.approx(wanted)
    assert plan.predicted is not None
    figures = relaxation.tables.entry(case, KEEP, None, 1)
    assert figures.held(1).max() == pytest.approx(plan.predicted.peak_bytes, rel=0.15)


def test_searches_gather_ahead_where_a_replica_alone_shares() -> None:
    pins = ("ep=2", "dp_shard=1", "pp=1", "zero=3", "prefetch=1", "num_microbatches=2")
    asked = make_problem(traced(), Cluster.local(4), precision="fp64", constraints=pins)
    best, all_of_them = (search_problem(asked, by) for by in ("ilp", "exhaustive"))
    (stage,) = best.stages
    assert (stage.mesh, stage.zero, stage.prefetch) == (
        {"dp_replicate": 2, "dp_shard": 1, "ep": 2}, 3, 1
    )  # fmt: skip
    assert best.predicted and all_of_them.predicted and best.evidence
    assert best.predicted.step_s == pytest.approx(all_of_them.predicted.step_s, rel=1e-9)
    assert 0 < best.evidence.bound_s <= best.predicted.step_s
    # No bound takes what is shared to be whole: with just the memory of that plan it is found.
    tight = (*pins, f"memory<={best.predicted.peak_bytes}B")
    asked = make_problem(traced(), Cluster.local(4), precision="fp64", constraints=tight)
    again = search_problem(asked, "ilp").predicted
    assert again and again.step_s == pytest.approx(best.predicted.step_s, rel=1e-9)


def test_lines_are_of_neighbours_first() -> None:
    """Ranks of a replica are next to each other in a folded line, whose ranks ascend."""
    stage = Stage(
        first="a", last="b", mesh={"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2, "tp": 2},
        devices=tuple(range(32)), batch_shares=(1,) * 4,
    )  # fmt: skip
    assert folds_of(stage.model) == ((), ("ep",), ("cp",), ("cp", "ep"))
    dense, experts = folded(stage, ("cp", "ep")), folded(stage, ("cp",))
    assert (dense.mesh, dense.dp) == ({"dp_replicate": 2, "dp_shard": 8, "tp": 2}, 16)
    assert stage_lines(dense)["dp_shard"][0] == tuple(range(0, 16, 2))
    assert experts.mesh == {"dp_replicate": 2, "dp_shard": 4, "ep": 2, "tp": 2}
    assert stage_lines(experts)["dp_shard"][0] == (0, 4, 8, 12)
    for view in (dense, experts):
        lines = [line for axis in ("dp", "dp_shard", "dp_replicate") for line in
                 stage_lines(view)[axis]]  # fmt: skip
        assert all(line == tuple(sorted(line)) for line in lines)
        assert all(view.coordinates(r)["tp"] == stage.coordinates(r)["tp"] for r in range(32))
    turned = replace(stage, mesh={"dp_shard": 2, "ep": 4}, devices=(0, 2, 4, 6, 1, 3, 5, 7))
    assert stage_lines(folded(turned, ("ep",)))["dp_shard"] == (tuple(range(8)),)


def test_clipping_and_checkpoints_are_those_of_one_process(tmp_path: Path) -> None:
    """A norm counts each part once, of whichever line of ranks; a checkpoint of folded parts goes
    on under any plan."""
    plans = {
        name: _plan(4, *ON_FOUR[name]) for name in ("zero1", "zero3", "cp and ep", "ep and tp")
    }
    plans["replicas"] = _plan(4, (), {"dp_replicate": 4, "zero": 0})
    check_each_goes_on(CASES["mixtral"], plans, traced(), tmp_path)


def _checked(model: nn.Module, plan: Plan, graph: Graph, batch: Any) -> str:
    job = compile_job(model, plan, optimizer="adam", lr=LEARNING_RATE, graph=graph, check=True)
    job.step(batch)
    job.close()
    return str(job.checked)


def test_copies_in_bfloat16_pass_the_self_check() -> None:
    case, mesh = CASES["mixtral"], EP2
    graph = trace(case.model().float(), case.example(8), case.loss_fn, precision="bf16")
    problem = make_problem(graph, Cluster.local(4), optimizer="adam")
    problem.solved[mesh, ""] = solve_layouts(graph, mesh, usual(mesh, QUICK))
    plan = build_plan(problem, uniform_choice(problem, model=mesh, dp_shard=2, zero=1))
    assert any(view.dp > plan.stages[0].dp for view in views_in(plan, graph, 0))
    batch = case.batch(8, torch.Generator().manual_seed(0))
    for said in run_ranks(4, _checked, case.model().float(), plan, graph, batch):
        assert "update" in said
