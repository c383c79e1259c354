"""What crosses between stages, and the conversions that no block's layout names."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from meshwright.codegen.collectives.comm import SentCollective
from meshwright.codegen.lower.lower import lower
from meshwright.costmodel.comm.borders import border, borders, part_bytes
from meshwright.costmodel.comm.comm import send_time
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.simulate.compiled_schedule import B, F
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import BlockLayout, Plan, ScheduleTable
from tests.codegen.equality import plan_of
from tests.costmodel.traffic import (
    BATCH,
    LENGTH,
    MEGATRON,
    PLANS,
    TWO,
    WIDTH,
    layouts,
    same_traffic,
    traced,
)

CLUSTER = Cluster.preset("a100-80")
TOKENS = BATCH * LENGTH * WIDTH * 8
"""Bytes of what crosses, whole."""


def mixed() -> list[BlockLayout]:
    """The first layer leaves its tokens split over columns, the others want them whole there."""
    sizes, ops, stored = PLANS["two axes"]
    whole = layouts(sizes, ops | {"tp_col": MEGATRON}, stored)
    return [layouts(sizes, ops, stored)[0], *whole[1:]]


def pipeline(found: Sequence[BlockLayout], *, last_mesh: dict[str, int] | None = None) -> Plan:
    """The first layer on four ranks, the others on the next four."""
    _, graph = traced()
    plan = plan_of(graph, found, (BATCH,), cuts=(1,))
    ranks = 4 if last_mesh is None else 1
    second = replace(
        plan.stages[1], devices=tuple(range(4, 4 + ranks)), mesh=last_mesh or plan.stages[1].mesh
    )
    schedule = ScheduleTable(name="gpipe", rows=("0F0 0B0", "1F0 1B0"))
    return replace(plan, stages=(plan.stages[0], second), schedule=schedule)


def tables() -> CostTables:
    return CostTables(traced()[1], CLUSTER, "fp64")


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2)])
def test_conversions_between_blocks_are_those_that_are_run(cuts: tuple[int, ...]) -> None:
    model, graph = traced()
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    found = same_traffic(model, graph, plan_of(graph, mixed(), (BATCH,), cuts=cuts), batch)
    # Without a border only columns are gathered; before one the value is made whole on rows too.
    for part in (4, 2):  # in forward there, and what the other side has sliced in backward
        assert found[SentCollective("tp_row", Primitive.ALL_GATHER, TOKENS // part)] == bool(cuts)


def test_a_part_crosses_where_both_stages_place_it_alike() -> None:
    same = pipeline(layouts(*PLANS["two axes"]))
    for plan, part in ((same, 4), (pipeline(mixed()), 1)):
        seconds, nbytes = border(tables(), plan, 0)
        assert nbytes == TOKENS // part
        assert seconds == send_time(nbytes, CLUSTER.link(0, 4))
        _, graph = traced()
        (value,) = lower(graph, plan, 0)[0].sends
        assert torch.Size(value.shape).numel() * 8 == nbytes
    assert not any(b.changes for b in borders(tables(), same))


def test_conversions_at_a_border_take_their_time() -> None:
    plan, costs = pipeline(mixed()), tables()
    first, second = (stage_costs(costs, plan, i) for i in range(2))
    site = costs.blocks.site(first.spot)
    gather, slices = Primitive.ALL_GATHER, Primitive.SLICE
    out = [(TOKENS // 2, "tp_row"), (TOKENS, "tp_col")]
    into = [(TOKENS, "tp_row")]
    assert first.passage.forward_s == pytest.approx(sum(site.primitive_s(gather, *m) for m in out))
    assert first.passage.backward_s == pytest.approx(sum(site.primitive_s(slices, *m) for m in out))
    assert second.passage.forward_s == pytest.approx(site.primitive_s(slices, *into[0]))
    assert second.passage.backward_s == pytest.approx(site.primitive_s(gather, *into[0]))
    for model, costed in zip(estimate_all(traced()[1], CLUSTER, plan, costs).models,
                             (first, second), strict=True):  # fmt: skip
        own = model.programs[F].own_by_what["tensor"]
        assert own == pytest.approx(costed.cost.comm_forward_s + costed.passage.forward_s)
        back = model.programs[B].own_by_what["tensor"]
        assert back == pytest.approx(costed.cost.comm_backward_s + costed.passage.backward_s)


def test_a_stage_of_another_mesh_gets_all_of_it() -> None:
    sizes, ops, stored = PLANS["two axes"]
    split = layouts(sizes, ops, stored)
    alone = layouts({}, {"dp": ops["dp"]}, {})[1:]
    plan = pipeline([split[0], *alone], last_mesh={"dp_replicate": 1, "dp_shard": 1})
    (leaving, entering), (_, nbytes) = borders(tables(), plan), border(tables(), plan, 0)
    assert nbytes == TOKENS and len(leaving.changes) == 1 and not entering.changes
    assert dict(TWO) == dict(plan.stages[0].model)


@pytest.mark.parametrize("found", [layouts(*PLANS["two axes"]), mixed()])
def test_parts_into_each_block_are_those_of_plans_cut_there(found: list[BlockLayout]) -> None:
    _, graph = traced()
    costs, by_pattern = tables(), {layout.pattern: layout for layout in found}
    parts = part_bytes(costs, by_pattern)
    for cut in (1, 2):
        first = borders(costs, plan_of(graph, found, (BATCH,), cuts=(cut,)))[0]
        assert parts[cut] == (first.ahead.whole_bytes, first.ahead.fixed_bytes)
    assert parts[0] == (0, 0) and parts[1] != (0, 0)
