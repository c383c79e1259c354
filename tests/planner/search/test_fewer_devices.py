"""What is left of many nodes is used in a number that divides."""

from functools import partial

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.remaining import without
from meshwright.planner.search.fewer_devices import LEAST, smaller_uses

WHOLE = Cluster.preset("h100-sxm", num_nodes=64, devices_per_node=8)
uses = partial(smaller_uses, batch=256, num_blocks=34, model_size=8)


@pytest.mark.parametrize("lost", [range(504, 512), [3]], ids=["a node", "a device"])
def test_uses_are_whole_nodes_and_the_rest_rests(lost):
    left = without(WHOLE, lost)
    found = uses(left, most=3)
    assert [use.cluster.num_nodes for use in found] == [56, 48, 52]
    for use in found:
        assert {len(node.devices) for node in use.cluster.nodes} == {8}
        assert use.cluster.num_devices + len(use.resting) == left.num_devices
        assert use.cluster.fingerprint == without(left, use.resting).fingerprint
        assert use.cluster.num_devices >= LEAST * left.num_devices
    if len(lost) == 1:  # the node of 7 devices is not among those that are used
        assert set(found[0].resting) >= set(range(7))
    assert [use.share for use in found] == sorted((use.share for use in found), reverse=True)
    assert found[0].pins == ("pp=7", "num_microbatches=32")


def test_frames_fill_the_nodes_that_are_used():
    """Also where a replica is less than a node, and nodes could be used in part."""
    for use in uses(without(WHOLE, range(504, 512)), model_size=3, most=9):
        ranks = int(use.pins[0].removeprefix("pp="))
        assert use.cluster.num_devices % (3 * ranks) == 0
        assert {len(node.devices) for node in use.cluster.nodes} == {8}


def test_a_number_that_divides_is_used_as_a_whole():
    assert uses(WHOLE, most=3) == ()
    assert uses(Cluster.preset("h100-sxm", num_nodes=15, devices_per_node=8), most=3) == ()
