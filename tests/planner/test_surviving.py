"""A search for plans whose state outlives a node."""

import pytest

import meshwright as mw
from meshwright.ir.plan.survival import lost_with
from meshwright.testing.nets import Net, data


def test_a_search_finds_what_survives():
    graph = mw.trace(Net(), data(), precision="fp64")
    two = mw.Cluster.preset("a100-80", num_nodes=2, devices_per_node=2)
    asked = {"progress": False, "time_limit_s": 4, "constraints": ("pp=1",)}
    free = mw.search(graph, two, constraints=("zero=1", "dp_shard=4"), progress=False)
    assert lost_with(free, two, "any node") == {0: (0, 1)}
    plan = mw.search(graph, two, survives="any node", **asked)
    assert not lost_with(plan, two, "any node") and plan.notes[0].startswith("survives any node")
    one = mw.Cluster.preset("a100-80", devices_per_node=2)
    with pytest.raises(mw.Infeasible, match=r"no plan was found.*node 0 alone holds"):
        mw.search(graph, one, survives="any node", **asked)
    with pytest.raises(mw.PlanError, match="throughput"):
        mw.search(graph, two, survives="any node", objective="memory")
