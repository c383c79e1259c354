"""What a profile says of blocks that it does not have."""

from dataclasses import replace

import pytest

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.block.block_costs import BlockSpot, on_data_alone
from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.profile.profile import BlockRecord, Profile
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.models import CASES
from tests.costmodel.explain.runs import MACHINE
from tests.costmodel.fit.timings import timing
from tests.traces import zoo_graph

CASE = CASES["gpt2"]
GRAPH = zoo_graph(CASE)
CLUSTER = Cluster.local(2)
PROBLEM = make_problem(GRAPH, CLUSTER, precision="fp32")
BLOCK = GRAPH.blocks[1]
NAME = CLUSTER.device_types[0].name
ALONE = BlockSpot(2, 1, (), NAME, (), ())
SPLIT = BlockSpot(4, 1, (("tp", 2),), NAME, (), ((),))


def layout(model):
    return next(x for x in PROBLEM.layouts(model) if x.pattern == BLOCK.pattern)


def profiled(slower: float) -> CostTables:
    """The unsplit block, slower than the model says; nothing else was measured."""
    plain = PROBLEM.tables.blocks
    said = plain.cost(BLOCK, layout(()), ALONE)
    key = plain.key(BLOCK, layout(()), ALONE)
    record = BlockRecord(
        key=key, pattern=BLOCK.pattern, samples=2, tp=1, processes=1,
        forward=timing(said.forward_s * slower), backward=timing(said.backward_s * slower),
        backward_input=None, backward_weight=None,
    )  # fmt: skip
    machine = replace(MACHINE, kind=CLUSTER.device_types[0].kind)
    profile = Profile(machine=machine, blocks={key: record})
    return CostTables(GRAPH, CLUSTER, "fp32", profile=profile)


def computed(cost: BlockCost) -> list[float]:
    """Forward and backward without communication."""
    return [cost.forward_s - cost.comm_forward_s, cost.backward_s - cost.comm_backward_s]


def test_a_layout_without_its_model_axes_is_the_one_for_none():
    key = PROBLEM.tables.blocks.key
    split = on_data_alone(layout((("tp", 2),)))
    assert key(BLOCK, split, ALONE) == key(BLOCK, layout(()), ALONE)


@pytest.mark.parametrize("slower", [0.8, 1.3])
def test_a_split_block_that_was_not_measured_errs_as_the_whole_one(slower):
    tables, model = profiled(slower), SPLIT.model
    said = PROBLEM.tables.blocks.cost(BLOCK, layout(model), SPLIT)
    found = tables.blocks.cost(BLOCK, layout(model), SPLIT)
    assert computed(found) == pytest.approx([slower * seconds for seconds in computed(said)])
    assert found.comm_forward_s == said.comm_forward_s > 0
    assert found.uncertain_s > 0.1 * (found.forward_s + found.backward_s)


def test_more_than_threefold_is_not_taken_over():
    tables, model = profiled(10.0), SPLIT.model
    said = PROBLEM.tables.blocks.cost(BLOCK, layout(model), SPLIT)
    found = tables.blocks.cost(BLOCK, layout(model), SPLIT)
    assert computed(found) == pytest.approx([3.0 * seconds for seconds in computed(said)])
