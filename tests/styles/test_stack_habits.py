"""What stacks do between blocks and stages: how far they recompute, how they send, what is known of
their runs."""

from dataclasses import replace

import pytest

from meshwright.costmodel.block.price_ops import PricedOp
from meshwright.costmodel.comm.comm import collective_time, send_time
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.simulate.replay import replay
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.placement import spots
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.styles import Style, style
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import in_detail
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.schedule_tools import make_schedule
from meshwright.planner.search.search import search
from tests.planner.problems import cluster, mlp, problem
from tests.styles.small_llama import small_llama

CLUSTER = Cluster.preset("h100-sxm", num_nodes=2)


def priced(stack: Style, monkeypatch: pytest.MonkeyPatch, cluster: Cluster = CLUSTER, **layout):
    """Tables, plan and estimate of the small Llama as a stack of the test's own runs it."""
    graph = small_llama()
    plan = build_plan(
        make_problem(graph, cluster, constraints=("sync=zero",), precision="bf16"),
        uniform_choice(make_problem(graph, cluster, precision="bf16"), **layout), predict=False,
    )  # fmt: skip
    monkeypatch.setattr("meshwright.costmodel.cost_cache.known_style", lambda name: stack)
    tables = CostTables(graph, cluster, plan.precision)
    return tables, plan, estimate_all(graph, cluster, plan, tables).prediction


def test_torchs_fsdp_divides_samples_and_parameters_alone():
    asked = {"precision": "bf16", "style": "fsdp", "progress": False}
    plan = search(small_llama(), CLUSTER, **asked)
    (stage,) = plan.stages
    assert {axis for axis, ranks in stage.mesh.items() if ranks > 1} <= {"dp_shard", "dp_replicate"}
    with pytest.raises(Infeasible, match="tp=2"):
        search(small_llama(), CLUSTER, constraints=("tp=2",), **asked)


def test_a_block_that_stops_early_leaves_out_its_last_product(monkeypatch):
    ours = style("")
    tables, plan, whole = priced(ours, monkeypatch, dp_shard=16, zero=1, recompute="full")
    early, _, less = priced(
        replace(ours, stops_early=True), monkeypatch, dp_shard=16, zero=1, recompute="full"
    )
    block = next(b for b in tables.graph.blocks if "*" in b.pattern)
    layers = sum(b.pattern == block.pattern for b in tables.graph.blocks)
    layout = next(x for x in plan.layouts if x.pattern == block.pattern)
    (spot,) = spots(early, plan.stages[0])
    ops = [e for e in early.blocks.walk(block, layout, spot).trail if isinstance(e, PricedOp)]
    products = [i for i, e in enumerate(ops) if e.op.target == "aten.linear.default"]
    head = [e.time for e in ops[: products[-1]]]
    again_s = max(sum(t.forward_s for t in head), sum(t.forward_dispatch_s for t in head))
    cost = early.block(block, layout, spot)
    assert cost.recomputed().again_s == pytest.approx(again_s)
    assert again_s < 0.97 * cost.forward_s  # small products: of the dispatch
    assert tables.block(block, layout, spot).recomputed().again_s == cost.forward_s
    left_out_s = layers * (cost.forward_s - again_s)
    assert whole.step_s - less.step_s == pytest.approx(left_out_s, rel=1e-2)


def test_messages_may_keep_both_ends_waiting():
    """By hand: forwards of 1 s, backwards of 2, messages of 0.5, two stages, two micro-batches."""
    schedule = make_schedule("one_f_one_b", 2, 2, 2)
    stages = [StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.5)] * 2
    assert simulate(schedule, stages).step_s == pytest.approx(10.0)
    waiting = simulate(schedule, [replace(stage, blocks=True) for stage in stages])
    assert waiting.step_s == pytest.approx(11.0)
    # Three stages run forwards to the first stage's turn back: nobody is there to receive.
    chunks = make_schedule("interleaved", 6, 6, 3)
    with pytest.raises(PlanError, match="hangs where sends wait"):
        simulate(chunks, [replace(stages[0], blocks=True)] * 6)
    for more, nearest in (({"offload_s": 0.1}, "saved=none"), ({}, "dual_pipe_v")):
        pairs = make_schedule("dual_pipe_v_pairs", 4, 4, 2)
        asked, count = (schedule, 2) if more else (pairs, 4)
        with pytest.raises(PlanError, match=f"nearest is {nearest}"):
            simulate(asked, [replace(stages[0], blocks=True, **more)] * count)


def test_a_report_of_such_a_stack_waits_too():
    found = {}
    for name in ("bloom", ""):
        asked = problem(mlp(8), cluster(4, slow=True), precision="fp32", style=name)
        plan = build_plan(asked, uniform_choice(asked, pp=4, num_microbatches=8))
        found[name] = replay(in_detail(asked, plan), messages=True)
    told = [one.predicted.step_s - one.timeline.step_s for one in found.values()]
    assert told[0] == pytest.approx(told[1]), "but for what comes after the schedule"
    assert found["bloom"].timeline.step_s > 1.02 * found[""].timeline.step_s
    assert {one.channel for one in found["bloom"].timeline.log} == {"compute", "message"}


def test_ranks_of_tp_send_parts_of_what_they_have_alike(monkeypatch):
    ours = style("")
    layout = {"pp": 2, "tp": 8, "num_microbatches": 2}
    _, _, whole = priced(ours, monkeypatch, **layout)
    tables, plan, parts = priced(replace(ours, parts_borders=True), monkeypatch, **layout)
    (link,) = tables.links(*plan.stages)
    target = plan.stages[1].devices
    sizes = [n for n in range(1 << 10, 1 << 27, 1 << 10) if
             send_time(n, link) == pytest.approx(whole.stages[0].send_s)]  # fmt: skip
    nbytes = sizes[len(sizes) // 2]
    gathered = collective_time(Primitive.ALL_GATHER, nbytes, tables.levels(target))
    expected = send_time(nbytes / 8, link) + gathered
    assert parts.stages[0].send_s == pytest.approx(expected, rel=1e-3)
    assert parts.stages[0].send_s < whole.stages[0].send_s


def test_a_port_of_a_node_is_shared_by_those_that_send(monkeypatch):
    cluster = Cluster.preset("h100-sxm", num_nodes=2, devices_per_node=2, network="ethernet-25g")
    tables, plan, _ = priced(style(""), monkeypatch, cluster, pp=4)
    inside, between = tables.links(*plan.stages[:2]), tables.links(*plan.stages[1:3])
    assert inside == {tables.cluster.link_of_nodes(0, 0)}
    (link,), alone = between, tables.cluster.link_of_nodes(0, 1)
    assert alone.shared_by == 2
    assert link.bandwidth_bytes_per_s == 2 * alone.bandwidth_bytes_per_s


def test_bands_are_what_runs_of_the_stack_showed(monkeypatch):
    _, _, wide = priced(style(""), monkeypatch, dp_shard=16, zero=1)
    _, _, known = priced(replace(style(""), band=0.5), monkeypatch, dp_shard=16, zero=1)
    assert known.error_band == pytest.approx(wide.error_band / 2)
    with pytest.raises(PlanError, match=r"band is 0.0; it must be from 0.1 to 10"):
        replace(style(""), band=0.0)


def test_owners_broadcast_one_after_the_other(monkeypatch):
    ours = style("")
    layout = {"dp_shard": 16, "zero": 1}
    step_s = priced(ours, monkeypatch, **layout)[2].step_s
    chained = priced(replace(ours, chain_hop_s=1e-3), monkeypatch, **layout)[2].step_s
    # Each of 16 owners over 14 hops inside two nodes and one between them.
    assert chained - step_s == pytest.approx(16 * 15 * 1e-3, rel=1e-6)
    network_s = CLUSTER.between_nodes.step_s
    least = priced(replace(ours, chain_hop_s=1e-9), monkeypatch, **layout)[2].step_s
    inside_s = CLUSTER.nodes[0].link.step_s
    assert least - step_s == pytest.approx(16 * (14 * inside_s + network_s), rel=1e-6)
    with pytest.raises(PlanError, match="chain_hop_s"):
        replace(ours, chain_hop_s=2.0)
