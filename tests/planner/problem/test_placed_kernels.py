"""Kernels that a plan's layout decides: their prices, and where `auto` puts them in."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.codegen.lower.lower import lower
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.ops.joint import JointTime, Price
from meshwright.costmodel.ops.routing import routed
from meshwright.costmodel.stage.placement import layouts_of, spots
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Fusion
from meshwright.ir.kernels import PLACED
from meshwright.ir.placed import joint_kernels, placed
from meshwright.ir.placed.spots import KernelSpot, Known, LaidBlock, everywhere
from meshwright.ir.plan.plan import Plan
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.placed_kernels import put_in
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.testing import tensor_forms as forms
from tests.codegen.quick import QUICK
from tests.model_axes import traced
from tests.planner import problems as tiny
from tests.planner.problem.large import RANKS, asked, cluster, large
from tests.runtime.fused_graphs import graph_of
from tests.runtime.joint_plans import MIDDLE, joint, sequence_plan


def chosen(plan: Plan, problem: Problem) -> tuple[dict[str, int], set[str]]:
    """Places of kernels, and why others were declined."""
    found = put_in(problem, plan)
    whys = {m.why for f in found for m in f.missed if m.declined}
    return {f.kernel: f.places for f in found if f.places}, whys


def test_where_it_pays():
    """What our products are slower by costs more than there is to hide, where rows are wide."""
    problem, plan = asked(large(), cluster())
    assert chosen(plan, problem) == ({"gather_linear": 1, "linear_scatter": 2}, set())
    problem, plan = asked(large(8192), cluster())
    places, whys = chosen(plan, problem)
    assert "linear_scatter" not in places
    assert "it would take 1.02 times as long on a100-80 (assumption, within 50%)" in whys


def test_why_not():
    nodes = asked(large(), cluster(nodes=RANKS))
    on_cpu = asked(traced(forms.case()), Cluster.local(RANKS), "fp32")
    doubles = asked(large(), cluster(), "fp64")
    for (problem, plan), reason in (
        (nodes, "they do not see each other's memory"),
        (on_cpu, "it would be torch's operators"),
        (doubles, "no kernel multiplies float64"),
    ):
        places, whys = chosen(plan, problem)
        assert not places and whys and all(reason in why for why in whys), whys


def test_blocks_are_looked_at_once_a_layout_and_axes() -> None:
    """Of many plans, with as many places as there are blocks."""
    problem = tiny.problem(tiny.mlp(4), tiny.cluster(2), optimizer="sgd")
    one, sharded, half = (
        build_plan(problem, uniform_choice(problem, dp_shard=2, zero=zero, num_microbatches=count))
        for zero, count in ((1, 1), (2, 1), (1, 2))
    )
    looked: list[LaidBlock] = []

    def look(laid: LaidBlock) -> list[KernelSpot]:
        looked.append(laid)
        return [KernelSpot(op) for op in problem.graph.block_ops(laid.block)[:1]]

    known: Known = {}
    for plan, more in ((one, True), (sharded, False), (half, True), (one, False)):
        before = len(looked)
        found = list(everywhere(plan, problem.graph, look, known))
        assert sum(count for _, count in found) == len(problem.graph.blocks) > len(found)
        assert len(looked) - before == more * len(found)
        assert found == list(everywhere(plan, problem.graph, look, {}))
        del looked[before + more * len(found) :]


def test_a_plan_with_them_is_predicted_with_them():
    problem, plan = asked(large(), cluster())
    tables = problem.tables
    with_kernels = replace(plan, kernels=put_in(problem, plan))
    before, after = (
        estimate(problem.graph, problem.cluster, p, tables)[0] for p in (plan, with_kernels)
    )
    (stage,) = plan.stages
    (spot,) = spots(tables, stage)
    saved = [0.0, 0.0]
    for block in problem.graph.blocks:
        found = tables.blocks.joint(block, layouts_of(plan, stage)[block.pattern], spot)
        for price in found.values():
            for index, way in enumerate((price.forward, price.backward)):
                _check(price, way)
                saved[index] += way.saved_s
    (old,), (new,) = before.stages, after.stages
    less = [old.forward_s - new.forward_s, old.backward_s - new.backward_s]
    assert min(saved) > 0.0 and saved == pytest.approx(less)
    assert after.step_s < before.step_s


def _check(price: Price, way: JointTime) -> None:
    """No less than the longer of both, and no more than one after the other."""
    product_s = way.separate_s - way.sent_s
    assert max(way.sent_s, product_s) < way.joint_s < way.separate_s
    assert price.source == "assumption" and price.band == 0.5


def test_what_is_declined_is_not_emitted():
    """The plan says where no call is to be made; the emitted module has separate ones there."""
    graph = graph_of("llama")
    plan = sequence_plan(graph, MIDDLE)
    source = lower(graph, plan, 0)[0].source
    without = placed(plan, graph, lambda kernel, at: "slow" * (kernel == "linear_scatter"))
    kept = lower(graph, replace(plan, kernels=without), 0)[0].source
    for name, calls in (("sharded.gather_linear(", 1), ("sharded.linear_scatter(", 2)):
        assert source.count(name) == calls
        assert kept.count(name) == (1 if "gather" in name else 0)
    assert joint(plan, graph) == plan


def test_experts_and_buckets():
    graph = replace(graph_of("mixtral"), fusions=tuple(Fusion(n, 0, priced=True) for n in PLACED))
    axes = (("ep", 2),)
    for where, taken in ((Cluster.preset("a100-80", devices_per_node=4), True),
                         (Cluster.local(4), False)):  # fmt: skip
        problem = make_problem(graph, where, precision="fp32")
        problem.solved[axes, ""] = solve_layouts(graph, axes, usual(axes, QUICK))
        choice = uniform_choice(problem, model=axes, dp_shard=2, zero=2)
        plan = build_plan(problem, choice)
        places = {f.kernel for f in plan.kernels if f.places}
        assert not places & joint_kernels()
        assert places == ({"bucket", "bucket_update", "route"} if taken else set())
        without = replace(plan, kernels=())
        (before, _), (after, _) = (
            estimate(graph, where, p, problem.tables) for p in (without, plan)
        )
        assert (after.step_s < before.step_s) is taken
        routing = replace(plan, kernels=tuple(f for f in plan.kernels if f.kernel == "route"))
        alone, _ = estimate(graph, where, routing, problem.tables)
        (old,), (new,) = before.stages, alone.stages
        saved = routes_saved(problem, plan) if taken else (0.0, 0.0)
        less = old.forward_s - new.forward_s, old.backward_s - new.backward_s
        assert less == pytest.approx(saved, rel=1e-6, abs=1e-12) and (min(saved) > 0) is taken


def routes_saved(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Seconds of a micro-batch's forward and backward, by the kernel in torch's place."""
    (stage,), tables = plan.stages, problem.tables
    (spot,) = spots(tables, stage)
    layouts, forward_s, backward_s = layouts_of(plan, stage), 0.0, 0.0
    for block in problem.graph.blocks:
        for tokens in tables.blocks.walk(block, layouts[block.pattern], spot).routes:
            ours, torchs = (routed(tokens, tables.devices[spot.device], by) for by in (True, False))
            forward_s += torchs.forward_s - ours.forward_s
            backward_s += torchs.backward_input_s - ours.backward_input_s
    return forward_s, backward_s


def test_a_search_says_what_it_put_in(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    given = torch.randn(8, 8), torch.randn(8, 8)
    plan = mw.search(
        model, Cluster.local(2), example_inputs=given, loss_fn=nn.functional.mse_loss,
        kernels="auto", precision="fp32", constraints=["zero=2", "dp=2"], progress=False,
    )  # fmt: skip
    assert "fused kernel bucket left out at stage 0 (1 place): on" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json") == plan


def test_a_step_pays_where_gradients_are_clipped_or_parameters_gathered():
    graph = replace(graph_of("llama"), fusions=(Fusion("bucket_update", 0, priced=True),))
    where = Cluster.preset("a100-80", devices_per_node=2)
    found = {}
    for norm, optimizer, zero in (
        (1.0, "adamw", 0), (None, "adamw", 0), (1.0, "rmsprop", 0), (None, "adamw", 1),
        (None, "adamw", 2), (None, "adamw", 3),
    ):  # fmt: skip
        problem = make_problem(graph, where, optimizer=optimizer, max_grad_norm=norm)
        mesh = {"dp_shard": 2, "zero": zero} if zero else {"dp_replicate": 2}
        plan = build_plan(problem, uniform_choice(problem, **mesh))
        (fusion,) = plan.kernels
        found[norm, optimizer, zero] = fusion.places, *(m.why for m in fusion.missed)
        plain = replace(plan, kernels=())
        (ours, _), (torchs, _) = (estimate(graph, where, p, problem.tables) for p in (plan, plain))
        assert (ours.step_s < torchs.step_s) is bool(fusion.places)
    plain = 0, "torch's fused step is one pass already, and nothing is clipped or packed"
    assert found[1.0, "adamw", 0] == found[None, "adamw", 1] == found[None, "adamw", 2] == (1,)
    assert found[None, "adamw", 0] == found[None, "adamw", 3] == plain
    assert "no kernel steps rmsprop" in found[1.0, "rmsprop", 0][1]


def test_where_the_host_would_wait_for_our_step_it_is_torchs():
    """Losses of float16 are scaled: torch's step is told on the device to leave one out."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    given, fusion = (torch.randn(8, 8), torch.randn(8, 8)), Fusion("bucket_update", 0, priced=True)
    found = {}
    for precision in ("bf16", "fp16"):
        traced = mw.trace(model, given, nn.functional.mse_loss, precision=precision)
        graph = replace(traced, fusions=(fusion,))
        where = Cluster.preset("a100-80", devices_per_node=2)
        problem = make_problem(graph, where, precision=precision, max_grad_norm=1.0)
        (put,) = build_plan(problem, uniform_choice(problem, dp_shard=2, zero=1)).kernels
        found[precision] = put.places, *(m.why for m in put.missed)
    assert found["bf16"] == (1,)
    places, why = found["fp16"]
    assert not places and "the host would wait in each step" in why


def test_prices_are_kept():
    problem, plan = asked(large(), cluster())
    tables = CostTables(problem.graph, problem.cluster, "bf16-autocast")
    (stage,) = plan.stages
    block = problem.graph.blocks[0]
    layout = layouts_of(plan, stage)[block.pattern]
    first, again = (tables.blocks.joint(block, layout, spots(tables, stage)[0]) for _ in "12")
    assert first and first is again
