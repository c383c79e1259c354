"""What of a plan's state is lost with a node; and clusters that have lost some devices."""

import pytest

from meshwright.forms.survival import lost_with, part_named, survival_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.remaining import without
from meshwright.ir.errors import PlanError
from meshwright.testing.handmade import plan_of
from tests.runtime.small_jobs import gpipe, stage

TWO = Cluster.preset("a100-80", num_nodes=2, devices_per_node=2)


def _plan(devices, mesh=None, zero=0):
    mesh = mesh or {"dp_replicate": 1, "dp_shard": len(devices), "tp": 1}
    shares = (24 // (mesh["dp_replicate"] * mesh["dp_shard"]),) * (
        mesh["dp_replicate"] * mesh["dp_shard"]
    )
    return plan_of((stage(0, 4, devices, mesh=mesh, shares=shares, zero=zero),), gpipe(1, 1), 1)


@pytest.mark.parametrize(
    ("mesh", "zero", "devices", "node", "device"),
    [
        ({"dp_replicate": 4, "dp_shard": 1, "tp": 1}, 0, (0, 1, 2, 3), (), ()),
        ({"dp_replicate": 1, "dp_shard": 4, "tp": 1}, 1, (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 1}, 3, (0, 1, 2, 3), (), ()),
        # The two copies of a shard share a node.
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 1}, 3, (0, 2, 1, 3), (0, 1), ()),
        ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 0, (0, 1, 2, 3), (), ()),
        ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 0, (0, 2, 1, 3), (0, 1), ()),
        ({"dp_replicate": 1, "dp_shard": 1, "cp": 4}, 0, (0, 1, 2, 3), (), ()),
        # ZeRO shards over `cp`, too, even where there is no other replica.
        ({"dp_replicate": 1, "dp_shard": 1, "cp": 4}, 1, (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)),
        ({"dp_replicate": 1, "dp_shard": 2, "cp": 2}, 1, (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)),
        ({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, 1, (0, 1, 2, 3), (), ()),
        # Experts are whole on `dp_replicate` alone, the rest on `ep`, too.
        ({"dp_replicate": 2, "dp_shard": 1, "ep": 2}, 0, (0, 1, 2, 3), (), ()),
        ({"dp_replicate": 2, "dp_shard": 1, "ep": 2}, 0, (0, 2, 1, 3), (0, 1), ()),
        ({"dp_replicate": 1, "dp_shard": 2, "ep": 2}, 1, (0, 2, 1, 3), (0, 1), (0, 1, 2, 3)),
        ({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, 3, (0, 1, 2, 3), (), ()),
        ({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, 3, (0, 2, 1, 3), (), ()),
    ],
)  # fmt: skip
def test_state_is_lost_with_its_only_holder(mesh, zero, devices, node, device):
    plan = _plan(devices, mesh, zero)
    assert lost_with(plan, TWO, "any node").get(0, ()) == node
    assert lost_with(plan, TWO, "any device").get(0, ()) == device
    (finding,) = survival_findings(plan, TWO)
    assert finding.message.startswith("not any node" if node else "any node")


def test_a_part_is_a_node_or_a_device():
    with pytest.raises(PlanError, match="'any node', 'any device'"):
        part_named("any rack")


def test_a_cluster_without_devices():
    assert without(TWO, ()) is TWO
    left = without(TWO, (1,))
    assert [len(node.devices) for node in left.nodes] == [1, 2]
    # Whichever of equal devices is lost, what is left is the same cluster.
    assert without(Cluster.local(4), {1}).fingerprint == without(Cluster.local(4), {3}).fingerprint
    assert without(TWO, (0, 1)).num_nodes == 1
    with pytest.raises(PlanError, match="all its 4 devices"):
        without(TWO, range(4))
