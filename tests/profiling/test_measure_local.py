"""Measuring this machine: complete, within its budget, and refused where forking would be wrong."""

from dataclasses import replace

import pytest

from meshwright.costmodel.fit.fit_compute import KernelTiming
from meshwright.costmodel.ops.formulas import KernelWork, kernel_s
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass, OpCurve
from meshwright.profiling.measure_local import _product, _with_products, measure_local
from meshwright.runtime.profiling import cpu_probes as kernels


@pytest.mark.parametrize("count", [1, 3])
def test_measured_cluster(count: int) -> None:
    cluster = measure_local(count, budget_s=0.3)
    device, link = cluster.device(0), cluster.nodes[0].link
    assert cluster.num_devices == count
    assert device.source == "measured"
    assert 1e8 < device.peak("float32") < 1e13
    assert device.peak("float64") < 2 * device.peak("float32")
    assert set(OpClass) - set(device.efficiency) - set(device.curves) == {OpClass.VIEW}
    assert 0 < device.overhead_s < 1e-3
    if count > 1:
        assert link.source == "measured"
        assert 1e6 < link.rate < 1e12 and 0 < link.latency_s < 1


def test_a_flat_product_tells_what_packing_costs() -> None:
    copy = OpCurve(share=0.9, cache_share=3.0, cache_bytes=2**20)
    plain = replace(Cluster.local(1).device(0), efficiency={OpClass.MATMUL: 1.0},
                    curves={OpClass.COPY: copy})  # fmt: skip
    truth = replace(plain, curves={**plain.curves, OpClass.MATMUL: OpCurve(share=0.8, packing=1.5)})

    def took(work: KernelWork) -> float:
        return kernel_s(work, truth) + plain.overhead_s

    cubes = [
        KernelTiming(w, took(w), plain.overhead_s)
        for n in kernels.EDGES
        for w in [_product(n, n, n)]
    ]
    rows, edge = kernels.FLAT
    found = _with_products(plain, cubes, took(_product(rows, edge, edge))).curves[OpClass.MATMUL]
    assert found.packing == pytest.approx(1.5, rel=0.1)
    assert found.share == pytest.approx(0.8, rel=0.1)


def test_timing_stops_at_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 10 ms on a core, for as long as which others have it, by clocks of our own: first
    with room for 15 of them, then for none."""
    on_core, by_clock = [0.0], [0.0]

    def call() -> None:
        on_core[0] += 0.01
        by_clock[0] += 0.02

    monkeypatch.setattr(kernels, "thread_time", lambda: on_core[0])
    monkeypatch.setattr(kernels, "perf_counter", lambda: by_clock[0])
    assert kernels.seconds_per_call(call, 0.295) == pytest.approx(0.01)
    first = on_core[0]
    assert kernels.seconds_per_call(call, 0.0) == pytest.approx(0.01)
    assert first - (on_core[0] - first) == pytest.approx(0.14)
