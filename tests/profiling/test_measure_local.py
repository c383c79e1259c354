"""Measuring this machine: complete, within its budget, and refused where forking would be wrong."""

from dataclasses import replace

import pytest

from meshwright.costmodel.fit.fit_compute import KernelTiming
from meshwright.costmodel.ops.formulas import KernelWork, kernel_s
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import COMPUTE, OpClass, OpCurve
from meshwright.profiling.measure_local import (
    _LEAST_S,
    _PIECES,
    _Computed,
    _device,
    _product,
    _TimedTurn,
    _with_products,
    measure_local,
)
from meshwright.profiling.small_layers import _priced_s
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
        # Experts' tokens travel by what was measured of all-to-all, not by what all-reduces say.
        measured = {known.operation for known in link.curves}
        assert measured == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}


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


def test_a_machine_is_what_makes_all_that_was_measured() -> None:
    """Attention of few keys, memory at the rate of what writes where it reads, and a dispatch with
    which small layers take what they took."""
    each = 1e-6
    curve = OpCurve(share=0.5, depth=60.0)
    truth = replace(
        Cluster.local(1).device(0), peak_flops={"float32": 1e11},
        memory_bandwidth_bytes_per_s=4e10, curves={OpClass.ATTENTION: curve},
    )  # fmt: skip

    def attended(heads: int, tokens: int, width: int) -> KernelWork:
        flops, nbytes = 4.0 * heads * tokens**2 * width, 16.0 * heads * tokens * width
        return KernelWork(OpClass.ATTENTION, "float32", flops, nbytes, depth=tokens)

    seen = _Computed(
        flops={"float64": 5e10, "float32": 1e11, "bfloat16": 2e10},
        compute={OpClass.CONVOLUTION: 5e10, OpClass.RECURRENT: 3e10},
        attention={x: kernel_s(attended(*x), truth) + each for x in kernels.ATTENTIONS},
        streaming=4e10,
        memory={c: {4.0 * n: 4.0 * n / 2e10 + each for n in kernels.ELEMENTS} for c in OpClass
                if c in truth.efficiency and c not in COMPUTE},
        matmul={n: 2e-11 * n**3 + each for n in kernels.EDGES}, flat_s=7e-4, overhead_s=each,
        layers_s=1e-2,
    )  # fmt: skip
    found = _device(Cluster.local(1).device(0), [seen, seen])
    assert found.memory_bandwidth_bytes_per_s == 4e10
    assert found.efficiency[OpClass.COPY] == pytest.approx(0.5, rel=0.05)
    for shape in ((64, 64, 32), (16, 128, 64), (8, 1024, 64)):
        took = kernel_s(attended(*shape), found)
        assert took == pytest.approx(kernel_s(attended(*shape), truth), rel=1e-3)
    assert found.overhead_s > 3 * each and _priced_s(found) == pytest.approx(1e-2, rel=1e-3)


def test_what_a_collective_takes_between_computing() -> None:
    """By the clock, and where cores are shared what it needs of them, as often as they are."""
    turn = _TimedTurn(wall_s=10e-3, busy_s=5e-3)
    assert turn.seconds(piece_s=1e-3, per_core=1.0) == pytest.approx(10e-3 - _PIECES * 1e-3)
    assert turn.seconds(piece_s=1e-3, per_core=2.0) == pytest.approx(2 * (5e-3 - _PIECES * 1e-3))
    assert turn.seconds(piece_s=1.0, per_core=1.0) == turn.seconds(1.0, 2.0) == _LEAST_S


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
