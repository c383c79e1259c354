"""The communication that the cost model counts is what generated code sends."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from meshwright.codegen.collectives.comm import SentCollective
from meshwright.costmodel.block.block import summary
from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.comm.comm import collective_time, group_levels
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.routing import spread_evenly
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis
from meshwright.ir.layout.op_messages import SHIFT, Inner
from meshwright.ir.plan.plan import ModelMesh
from meshwright.ir.styles import style
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.routes import count_routes
from meshwright.testing.models import CASES
from tests.codegen.equality import plan_of
from tests.costmodel.traffic import (
    BATCH,
    LENGTH,
    PLANS,
    WIDTH,
    expected,
    layouts,
    same_traffic,
    sent_by_each,
    traced,
    walks,
)
from tests.traces import zoo_graph
from tests.travelling import travelling


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_blocks_send_what_is_priced(name: str, dp: int) -> None:
    sizes, ops, stored = PLANS[name]
    model, graph = traced()
    plan = plan_of(graph, layouts(sizes, ops, stored), (BATCH // dp,) * dp)
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    assert same_traffic(model, graph, plan, batch)


def test_two_axes_by_hand() -> None:
    """A layer gathers and scatters tokens over columns, and its weights over rows."""
    sizes, ops, stored = PLANS["two axes"]
    model, graph = traced()
    plan = plan_of(graph, layouts(sizes, ops, stored), (BATCH,))
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    found = same_traffic(model, graph, plan, batch)
    tokens, weight = BATCH * LENGTH * WIDTH * 8 // 2, WIDTH * 16 * 8 // 2
    gather, scatter = Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER
    # x is gathered for `up`, the sum of `down` scattered; backward mirrors it, but for the input.
    assert found[SentCollective("tp_col", gather, tokens // 2)] == 3 + 3
    assert found[SentCollective("tp_col", scatter, tokens)] == 3 + 2
    assert found[SentCollective("tp_row", gather, weight // 2)] == 2 * 3
    assert found[SentCollective("tp_row", scatter, weight)] == 2 * 3
    assert found[SentCollective("tp_col", Primitive.ALL_REDUCE, 8)] == 1  # the loss, on both axes
    assert found.total() == 25


def test_seconds_and_bytes_of_three_axes_by_hand() -> None:
    """The second layer; parts are those of a rank."""
    sizes, ops, stored = PLANS["three axes"]
    _, graph = traced()
    plan = plan_of(graph, layouts(sizes, ops, stored), (BATCH,))
    walk, block = walks(graph, plan)[1], graph.blocks[1]
    cost = summary(walk, block, plan.layouts[1])
    tokens, weight, bias = BATCH * LENGTH * WIDTH * 8 // 4, WIDTH * 16 * 8 // 2, WIDTH * 8
    moves = [  # both ways
        *[(tokens, "tp_col")] * 2, *[(weight, "tp_row")] * 2, (bias, "tp_depth"),
    ]  # fmt: skip
    gather = sum(walk.site.primitive_s(Primitive.ALL_GATHER, n, axis) for n, axis in moves)
    scatter = sum(walk.site.primitive_s(Primitive.REDUCE_SCATTER, n, axis) for n, axis in moves)
    mixed = walk.site.primitive_s(Primitive.REDUCE_SCATTER, tokens, "tp_col")
    mixed -= walk.site.primitive_s(Primitive.ALL_GATHER, tokens, "tp_col")
    masked = walk.site.primitive_s(Primitive.MASK, bias, "tp_col")
    assert cost.comm_forward_s == pytest.approx(gather + mixed + masked)
    assert cost.comm_backward_s == pytest.approx(scatter - mixed)
    assert dict(zip(block.params, cost.param_bytes, strict=True)) == {
        "h_1_up_weight": weight // 2, "h_1_up_bias": 16 * 8 // 2,
        "h_1_down_weight": weight // 2, "h_1_down_bias": bias // 2,
    }  # fmt: skip
    rows = ("tp_depth", "tp_row")
    assert cost.summed_over == (("tp_depth",), rows, ("tp_depth",), ("tp_row",))
    # x whole on columns, what relu makes, and both weights as gathered; x itself is not read.
    assert cost.saved_bytes == tokens + tokens + 2 * weight
    assert cost.saved_inputs == (tokens // 2,)  # a leaf of the block's backward
    assert cost.output_bytes == (tokens // 2,)
    # `down` reads what relu makes, a gathered weight and bias, and makes a sum of x's size.
    assert cost.workspace_bytes == 2 * tokens + weight + bias


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", (("tp", 2),)),
        ("gpt2", (("tp_row", 2), ("tp_col", 2))),
        ("llama", (("cp", 2), ("tp", 2))),
        ("resnet50", (("tp", 2),)),
    ],
)
def test_planned_layouts_send_what_is_priced(name: str, mesh: ModelMesh) -> None:
    case = CASES[name]
    model, batch = case.model(), case.example()
    graph = zoo_graph(case)
    values = batch.values() if isinstance(batch, dict) else batch
    named = dict(zip(graph.input_names, values, strict=True))
    problem = make_problem(graph, Cluster.local(4), precision="fp64")
    plan = plan_of(graph, problem.layouts(mesh), (case.batch_size // 2,) * 2)
    assert same_traffic(model, graph, plan, named)


def test_tokens_go_to_their_experts_as_is_priced() -> None:
    """Where tokens were counted, all ranks together send as many bytes as is priced, to rounding;
    spread evenly they would send others."""
    case = CASES["mixtral"]
    model, batch = case.model(), case.example()
    assert isinstance(batch, dict)
    graph = trace(model, batch)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[0] *= 8  # an expert that many tokens pick, or few
    routes = count_routes(model, [batch])
    problem = make_problem(
        graph, Cluster.local(8), precision="fp64", routes=routes,
        constraints=("place *.experts.* ep=S(0)",),
    )  # fmt: skip
    plan = plan_of(graph, travelling(problem.layouts((("ep", 2),), "own")), (case.batch_size,))
    each, even = sent_by_each(model, graph, plan, batch), expected(graph, plan)
    routed = [[t for t in found if t.primitive == Primitive.ALL_TO_ALL] for found in each]
    others = [
        Counter(t for t in found if t.primitive != Primitive.ALL_TO_ALL)
        for found in (each[0], even)
    ]  # fmt: skip
    assert others[0] == others[1]
    mean = sum(t.nbytes for found in routed for t in found) / len(each)
    priced, evenly = (
        sum(t.nbytes for t in expected(said, plan) if t.primitive == Primitive.ALL_TO_ALL)
        for said in (problem.graph, graph)
    )
    assert mean == pytest.approx(priced, rel=1e-4)
    assert mean != pytest.approx(evenly, rel=1e-2)


def test_messages_cost_no_transfer_where_no_tiers_are_given():
    """A block's key is made without knowing where it runs."""
    device = Cluster.local(2).device_types[0]
    site = StageSite(axes={"tp": Axis(2)}, coordinates={"tp": 0}, device=device, levels={"tp": ()})
    message = Inner(SHIFT, 4096, 3, backward=False)
    here = replace(site, levels={"tp": group_levels((0, 1), Cluster.local(2))})
    assert 0 < site.inner_s(message, "tp") < here.inner_s(message, "tp")
    busy = replace(Inner(Primitive.ALL_TO_ALL, 1 << 20, 2, backward=False), crowd=1.5)
    mean_s = here.inner_s(replace(busy, crowd=1.0), "tp")
    assert here.inner_s(busy, "tp") == pytest.approx(1.5 * mean_s) and mean_s > 0


ROUTING = spread_evenly(64, 8)


def test_tokens_are_handed_on_inside_of_nodes_while_others_come():
    """Where the links of a node are no faster than the network, they set the pace: all copies pass
    them, those for half of the ranks on each of two nodes."""
    cluster = Cluster.preset("h100-sxm", num_nodes=2)
    fast = group_levels(range(16), cluster)
    levels = (replace(fast[0], link=fast[1].link), fast[1])
    nbytes, all_to_all = 1 << 28, Primitive.ALL_TO_ALL
    message = Inner(all_to_all, nbytes, 1, backward=False, routing=ROUTING, held=4)

    def seconds(name: str) -> float:
        site = StageSite(
            {"ep": Axis(16)}, {"ep": 0}, cluster.device(0), {"ep": levels}, run_as=style(name)
        )
        return site.inner_s(message, "ep")

    inside_s = collective_time(all_to_all, nbytes / 2, levels[:1])
    assert seconds("nemo-flex") == pytest.approx(inside_s)
    # Beside another micro-batch's work a part of it is hidden.
    shown = style("nemo-flex-beside").travel_shown
    assert seconds("nemo-flex-beside") == pytest.approx(shown * inside_s) and shown < 1
    # Of eight experts that follow on each other two ranks have all: two copies instead of 6.5.
    few_s = collective_time(all_to_all, nbytes * 2 / ROUTING.copies(16) / 2, levels[:1])
    assert seconds("automodel") == pytest.approx(few_s)
