"""Measuring this machine: complete, within its budget, and refused where forking would be wrong."""

from collections.abc import Callable

import pytest

from meshwright.costmodel import kernels
from meshwright.costmodel.measure import measure_local
from meshwright.ir.device import OpClass


@pytest.mark.parametrize("count", [1, 3])
def test_measured_cluster(count: int) -> None:
    cluster = measure_local(count, budget_s=0.3)
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


@pytest.mark.parametrize("timed", [kernels.seconds_per_call, kernels.typical_seconds])
def test_timing_stops_at_its_budget(
    timed: Callable[[Callable[[], object], float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of 10 ms by a clock of our own, first with room for 30 of them, then for none."""
    now = [0.0]

    def call() -> None:
        now[0] += 0.01

    monkeypatch.setattr(kernels, "perf_counter", lambda: now[0])
    assert timed(call, 0.295) == pytest.approx(0.01)
    first = now[0]
    assert timed(call, 0.0) == pytest.approx(0.01)
    assert first - (now[0] - first) == pytest.approx(0.29)
