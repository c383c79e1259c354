"""Where tokens of mixtures go: what is counted, assumed, kept, and made of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.costmodel.block.block_costs import BlockSpot, on_data_alone
from meshwright.costmodel.block.price_ops import PricedOp
from meshwright.costmodel.block.reprice import OpStep
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.ops.expert_passes import passes_beside
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.routed_graph import with_routing
from meshwright.ir.graph.routing import Routing, spread_evenly
from meshwright.ir.plan import plan_io
from meshwright.ir.profile.route_counts import RouteCounts, counts_of
from meshwright.ir.trace.declared import mix_experts
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.cluster_prices import OpTimes
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.routes import count_routes
from meshwright.testing.models import CASES
from meshwright.tools.check import price
from tests.traces import zoo_graph
from tests.travelling import travelling

PICKS = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]], bool)


def test_counts_by_hand(tmp_path: Path) -> None:
    one = counts_of(PICKS, 2)
    assert one.reached == {1: 3, 2: 4, 4: 6} and one.arrived == {1: 3, 2: 3, 4: 3}
    assert one.worked == {1: 6, 2: 5, 4: 3} and (one + one).worked == {1: 12, 2: 10, 4: 6}
    known = RouteCounts({"a": one, "b": one + one}).routing(4, 2)
    assert known and known.source == "counted"
    assert known.copies(2) == pytest.approx(4 / 3, rel=1e-5)
    assert known.load(2) == pytest.approx(5 / 3, rel=1e-5) and known.crowd(4) == 2.0
    assert known.load(3) == pytest.approx((5 / 3 + 2) / 2, rel=1e-5)
    counts = RouteCounts({"a": one})
    counts.save(tmp_path / "routes.json")
    assert RouteCounts.load(tmp_path / "routes.json") == counts
    data = json.loads((tmp_path / "routes.json").read_text())
    rows = data["layers"]["a"]["ranks"]
    # More pairs than there are; fewer than the mean rank's; fewer tokens than the mean rank's; more
    # than all ranks' together.
    for at, wrong in ((3, 7), (3, 2), (2, 1), (2, 5)):
        said, rows[1][at] = rows[1][at], wrong
        (tmp_path / "routes.json").write_text(json.dumps(data))
        with pytest.raises(PlanError, match="count_routes"):
            RouteCounts.load(tmp_path / "routes.json")
        rows[1][at] = said


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"reached": (1.0, 0.0)}, "tokens reach 0.0"),
        ({"arrived": (1.0, 0.5)}, "busiest has 0.5"),
        ({"worked": (1.0, 0.0)}, "and 0.0 times"),
        ({"worked": (1.0, 2.5)}, "and 2.5 times"),
        ({"ranks": (1, 3)}, "from 1 to 2"),
        ({"ranks": (2, 1)}, "from 1 to 2"),
        ({"band": -0.1}, "band is -0.1"),
    ],
)
def test_what_a_plan_says_can_be(what: dict[str, Any], error: str) -> None:
    known = spread_evenly(2, 1)
    columns = {name: (1.0, 1.0) for name in ("reached", "arrived", "worked")}
    assert replace(known, ranks=(1, 2), **columns).load(2) == 1.0
    with pytest.raises(PlanError, match=error):
        replace(known, **{"ranks": (1, 2), **columns, **what})


def test_layers_whose_tokens_are_all_dropped_tell_nothing() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.rand(2, 4, 4)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = torch.full((len(x), 1), 2)
            return mix_experts(x, index, torch.ones(len(x), 1), self.up, self.down)

    with pytest.raises(PlanError, match="a token that is not dropped"):
        count_routes(Dropping(), [torch.rand(3, 4)])


def test_assumed_popularity_has_a_band() -> None:
    mild, steep = (RouteCounts.load(f"zipf:{s}") for s in (0.1, 1.0))
    assert mild and steep
    few, many = mild.routing(16, 2), steep.routing(16, 2)
    assert few and many and few.source == "assumed" and 0 < few.band < many.band
    assert 1.0 < few.load(8) < many.load(8)
    assert few.copies(8) == pytest.approx(spread_evenly(16, 2).copies(8), rel=0.02)
    with pytest.raises(PlanError, match=r"zipf:0\.5"):
        RouteCounts.load("zipf:x")
    with pytest.raises(PlanError, match="from 1 to 4"):
        Routing(experts=4, picked=2, ranks=(1, 8), reached=(1, 2), arrived=(1, 1), worked=(1, 1))


def test_all_wait_for_the_busiest_rank() -> None:
    """A plan tells what it was priced with, and is priced so again; that is no part of its hash."""
    case = CASES["mixtral"]
    model, batch = case.model(), case.example()
    graph = trace(model, batch, global_batch_size=4096)
    counted = count_routes(model, [batch]).routing(4, 2)
    assert counted
    worked = replace(counted, worked=(1.0, 1.8, 2.0), arrived=(1.0,) * 3)
    crowded = replace(worked, arrived=(1.0, 1.2, 1.4))
    cluster, plans, keys = Cluster.local(8), [], []
    for routes in (None, RouteCounts(known=(worked,)), RouteCounts(known=(crowded,))):
        problem = make_problem(
            graph, cluster, routes=routes, constraints=("place *.experts.* ep=S(0)",)
        )
        choice = uniform_choice(problem, model=(("ep", 2),), variant="own", dp_replicate=4)
        plan = build_plan(problem, choice, predict=False)
        plan = replace(plan, layouts=travelling(plan.layouts))
        plans.append(replace(plan, predicted=predict_plan(problem, plan)))
        block, blocks = graph.blocks[1], problem.tables.blocks
        layout = next(x for x in plan.layouts if x.pattern == block.pattern)
        whole = BlockSpot(2, 1, (), cluster.device_types[0].name, (), ())
        split = replace(whole, model=(("ep", 2),), model_levels=((),))
        keys.append(
            (
                blocks.key(block, on_data_alone(layout), whole),
                blocks.key(block, layout, split),
            )
        )
    even, busy, skewed = (plan.predicted for plan in plans)
    assert even and busy and skewed
    assert even.step_s < busy.step_s < skewed.step_s
    assert even.peak_bytes < busy.peak_bytes < skewed.peak_bytes
    # What was measured of blocks whose tokens spread evenly is of others, once experts are split.
    assert keys[0][0] == keys[2][0] and keys[0][1] != keys[2][1]
    assert plan_io.rehash(plans[0]).hash == plan_io.rehash(plans[2]).hash
    again = plan_io.loads(plan_io.dumps(plans[2]))
    assert again.routing == (crowded,)
    priced = price(again, graph, cluster, None).predicted
    assert priced and priced.step_s == skewed.step_s
    assert [estimate(graph, cluster, plan)[0].peak_bytes for plan in plans] == [
        found.peak_bytes for found in (even, busy, skewed)
    ]
    assert with_routing(graph) is graph
    with pytest.raises(PlanError, match=r"the model has \[\(4, 2, 0\)\]"):
        make_problem(graph, cluster, routes=RouteCounts(known=(spread_evenly(8, 2),)))


def test_experts_on_two_axes_wait_for_the_busiest_of_all_their_ranks() -> None:
    case = CASES["mixtral"]
    graph, cluster = trace(case.model(), case.example(), global_batch_size=4096), Cluster.local(8)
    known = replace(
        spread_evenly(4, 2), source="counted", ranks=(1, 2, 4), reached=(1.0, 1.5, 2.0),
        arrived=(1.0, 1.2, 1.4), worked=(1.0, 1.5, 2.0),
    )  # fmt: skip
    problem = make_problem(
        graph, cluster, routes=RouteCounts(known=(known,)),
        constraints=tuple(f"place *.experts.* {axis}=S(0)" for axis in ("ep", "tp")),
    )  # fmt: skip
    block, model = graph.blocks[1], (("ep", 2), ("tp", 2))
    layout = next(x for x in problem.layouts(model) if x.pattern == block.pattern)
    spot = BlockSpot(4, 1, model, cluster.device_types[0].name, (), ((), ()))
    script = problem.tables.blocks.walk(block, layout, spot).script
    assert [s.busiest for s in script if isinstance(s, OpStep) and s.busiest] == [2.0]


def test_blocks_on_gpus_have_the_passes_of_their_experts() -> None:
    case = CASES["mixtral"]
    cluster = Cluster.preset("h100-sxm")
    graph = zoo_graph(case, precision="bf16")
    problem = make_problem(graph, cluster)
    block = graph.blocks[1]
    layout = next(x for x in problem.layouts(()) if x.pattern == block.pattern)
    spot = BlockSpot(4, 1, (), cluster.device_types[0].name, (), ())
    walk = problem.tables.blocks.walk(block, layout, spot)
    passes = [passes_beside(x.local, x.time, walk.site.device, walk.site.run_as)
              for x in walk.trail if isinstance(x, PricedOp)]  # fmt: skip
    (found,) = filter(None, passes)
    assert walk.tape.count(found) == 1
    # Whoever chooses layouts prices them so, too.
    (experts,) = (
        x for x in walk.trail if isinstance(x, PricedOp) and x.op.target == EXPERTS_TARGET
    )
    shapes = [x.shape for x in experts.local.inputs], experts.local.outputs
    layouts_s = OpTimes.of(problem.tables)(experts.op, *shapes, 4 / graph.batch_size)
    dispatched_s = sum(
        t.forward_dispatch_s + t.input_dispatch_s + t.weight_dispatch_s
        for t in (experts.time, found)
    )
    assert experts.time.total_s + found.total_s < dispatched_s
    assert layouts_s == pytest.approx(dispatched_s)
    # And in 8-bit floats where a stack multiplies experts so.
    wide_s, narrow_s = (
        OpTimes.of(CostTables(traced, cluster, name, style="megatron"))(op, *shapes, 1e9)
        for name in ("bf16", "fp8-tensorwise")
        for traced in [zoo_graph(case, precision=name)]
        for op in traced.ops
        if op.name == experts.op.name
    )
    assert narrow_s < 0.95 * wide_s
