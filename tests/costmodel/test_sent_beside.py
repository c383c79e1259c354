"""What of an op's own messages is left where it computes meanwhile."""

from dataclasses import replace

import pytest

from meshwright.costmodel.block.clock import BlockSums
from meshwright.costmodel.block.sent import InnerSent
from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.comm.comm import group_levels
from meshwright.costmodel.ops.compute import OpTime
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.layout.layout import Axis
from meshwright.ir.layout.op_messages import SHIFT, Inner

CLUSTER = Cluster.preset("h100-sxm", num_nodes=1)
RANKS, NBYTES = 4, 1 << 26
SENT = Inner(SHIFT, NBYTES, RANKS - 1, backward=False, beside=True)


def site(*, slows: float = 1.0, shares_cores: bool = False) -> StageSite:
    levels = tuple(
        replace(x, link=replace(x.link, overlap_compute_slowdown=slows, beside=()))
        for x in group_levels(range(RANKS), CLUSTER)
    )
    return StageSite(
        {"cp": Axis(RANKS)}, {"cp": 0}, CLUSTER.device(0), {"cp": levels},
        shares_cores=shares_cores,
    )  # fmt: skip


def left_s(place: StageSite, computing_s: float) -> float:
    clock = BlockSums()
    time = OpTime(computing_s, 0.0, 0.0, "measured", 0.0)
    InnerSent("cp", NBYTES, (SENT,), (), time).tell(clock, place)
    return clock.comm_forward_s


def test_nothing_comes_beside_the_last_part() -> None:
    here = site()
    whole_s = here.inner_s(SENT, "cp")
    assert left_s(here, 100 * whole_s) == 0.0
    # A rank computes four parts, and messages travel beside three.
    assert left_s(here, 0.8 * whole_s) == pytest.approx(0.4 * whole_s)
    assert left_s(here, 0.0) == pytest.approx(whole_s)


def test_messages_slow_what_they_are_beside() -> None:
    here = site(slows=1.25)
    whole_s = here.inner_s(SENT, "cp")
    # In the time of the messages a fifth less is computed.
    assert left_s(here, 100 * whole_s) == pytest.approx(0.2 * whole_s)


def test_processes_that_share_cores_hide_nothing() -> None:
    here = site(shares_cores=True)
    whole_s = here.inner_s(SENT, "cp")
    assert left_s(here, 100 * whole_s) == pytest.approx(whole_s)
