"""Measuring this machine: quick, complete, and refused where forking would be wrong."""

from time import perf_counter

import pytest

from meshwright.costmodel.measure import measure_local
from meshwright.ir.device import OpClass


@pytest.mark.parametrize("count", [1, 3])
def test_measured_cluster(count: int) -> None:
    start = perf_counter()
    cluster = measure_local(count, budget_s=0.3)
    assert perf_counter() - start < 40
    device, link = cluster.device(0), cluster.nodes[0].link
    assert cluster.num_devices == count
    assert device.source == "measured"
    assert 1e8 < device.peak("float32") < 1e13
    assert device.peak("float64") < 2 * device.peak("float32")
    assert set(OpClass) - set(device.efficiency) == {OpClass.VIEW}
    assert 0 < device.overhead_s < 1e-3
    if count > 1:
        assert link.source == "measured"
        assert 1e6 < link.rate < 1e12 and 0 < link.latency_s < 1
