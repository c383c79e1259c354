"""Fits on data made from a known law with noise, judged on what was held out."""

from dataclasses import replace
from random import Random

import pytest

from meshwright.costmodel.fit.calibrated import calibrated
from meshwright.costmodel.fit.fit_compute import KernelTiming, fit_curve, fit_device
from meshwright.costmodel.ops.formulas import KernelWork, kernel_s
from meshwright.costmodel.ops.optimizer import optimizer_time
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass, OpCurve
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.presets import DEVICES, cpu_process
from meshwright.ir.profile.profile import OptimizerRecord, Profile, Timing
from tests.costmodel.fit.cpu_profiles import cpu_profile

A100 = DEVICES["a100-80"]
CPU = cpu_process(2**34)
NOISE = 0.03


def noisy(seconds: float, random: Random) -> float:
    return seconds * random.lognormvariate(0.0, NOISE)


def products(device: DeviceType, count: int, random: Random) -> list[KernelTiming]:
    samples = []
    for _ in range(count):
        m, n, k = (64 * round(2 ** random.uniform(0, 8)) for _ in range(3))
        moved = 2.0 * (m * k + k * n + m * n)
        work = KernelWork(OpClass.MATMUL, "bfloat16", 2.0 * m * n * k, moved, (Gemm(1, m, n, k),))
        samples.append(KernelTiming(work, noisy(kernel_s(work, device), random)))
    return samples


def median_error(device: DeviceType, samples: list[KernelTiming]) -> float:
    found = sorted(abs(kernel_s(s.work, device) / s.seconds - 1) for s in samples)
    return found[len(found) // 2]


def test_matmul_fit_holds_on_shapes_it_has_not_seen() -> None:
    law = OpCurve(share=0.7, depth=180, quantum=0.4, small_tile=0.8, split_depth=400, floor_s=6e-6)
    truth = replace(A100, curves={**A100.curves, OpClass.MATMUL: law})
    samples = products(truth, 200, Random(1))
    start = OpCurve(share=0.5, depth=50, quantum=0.1, small_tile=0.95, split_depth=100,
                    floor_s=2e-6, droop=0.01)  # fmt: skip
    curve = fit_curve(OpClass.MATMUL, samples[::2], A100, start)
    fitted = replace(A100, curves={**A100.curves, OpClass.MATMUL: curve})
    before = replace(A100, curves={**A100.curves, OpClass.MATMUL: start})
    assert median_error(before, samples[1::2]) > 0.15
    assert median_error(fitted, samples[1::2]) < 1.5 * NOISE
    assert curve.source == "fitted" and NOISE < curve.band < 0.15


def test_memory_fit_finds_both_rates_and_the_floor() -> None:
    law = OpCurve(share=0.6, cache_share=2.4, cache_bytes=2**22, floor_s=5e-6)
    truth = replace(A100, curves={OpClass.ELEMENTWISE: law})
    random = Random(2)
    works = [KernelWork(OpClass.ELEMENTWISE, "float32", 0.0, 2 ** random.uniform(10, 30))
             for _ in range(120)]  # fmt: skip
    samples = [KernelTiming(w, noisy(kernel_s(w, truth), random)) for w in works]
    curve = fit_curve(OpClass.ELEMENTWISE, samples[::2], A100, OpCurve(share=0.9))
    fitted = replace(A100, curves={OpClass.ELEMENTWISE: curve})
    assert median_error(fitted, samples[1::2]) < 1.5 * NOISE
    assert curve.share == pytest.approx(0.6, rel=0.1)
    assert curve.floor_s == pytest.approx(5e-6, rel=0.3)


def test_one_size_tells_the_share_alone() -> None:
    work = KernelWork(OpClass.COPY, "float32", 0.0, 1e8)
    start = A100.curves[OpClass.COPY]
    curve = fit_curve(OpClass.COPY, [KernelTiming(work, 1e-3)] * 3, A100, start)
    fitted = replace(A100, curves={OpClass.COPY: curve})
    assert kernel_s(work, fitted) == pytest.approx(1e-3, rel=0.01)
    assert curve.floor_s == start.floor_s and curve.cache_bytes == start.cache_bytes
    assert curve.cache_share / curve.share == pytest.approx(start.cache_share / start.share)
    assert curve.band == pytest.approx(0.1)


def test_outliers_do_not_move_the_fit() -> None:
    truth = replace(A100, curves={OpClass.COPY: OpCurve(share=0.5, floor_s=4e-6)})
    works = [KernelWork(OpClass.COPY, "float32", 0.0, 2.0**e) for e in range(12, 30)]
    samples = [KernelTiming(w, kernel_s(w, truth)) for w in works]
    samples[9] = replace(samples[9], seconds=5 * samples[9].seconds)
    curve = fit_curve(OpClass.COPY, samples, A100, OpCurve(share=0.9))
    fitted = replace(A100, curves={OpClass.COPY: curve})
    clean = [s for i, s in enumerate(samples) if i != 9]
    assert median_error(fitted, clean) < 0.03


def test_calibrated_devices_give_measured_times_back() -> None:
    profile = cpu_profile()
    cluster = calibrated(Cluster.local(2), profile)
    device = cluster.device(0)
    assert device.source == "fitted" and "a CPU" in device.reference
    for n in (48, 200, 700):  # between those that were measured
        work = KernelWork(OpClass.MATMUL, "float32", 2.0 * n**3, 12.0 * n * n, (Gemm(1, n, n, n),))
        seconds = kernel_s(work, device) + device.overhead_s
        assert seconds == pytest.approx(2e-5 + 2.0 * n**3 / 4e10, rel=0.15)


def test_a_profile_in_float32_says_what_float32_takes() -> None:
    """And nothing of half precision, whose share stays."""
    device = DEVICES["v100-16"]
    before = device.curves[OpClass.MATMUL]
    samples = [
        KernelTiming(
            KernelWork(OpClass.MATMUL, "float32", 2.0 * n**3, 12.0 * n * n, (Gemm(1, n, n, n),)),
            2.0 * n**3 / 5e12,
        )
        for n in (1024, 2048, 3072, 4096, 6144, 8192)
    ]  # fmt: skip
    after = fit_curve(OpClass.MATMUL, samples, device, before)
    assert after.share == before.share
    assert after.wide_share == pytest.approx(5e12 / device.peak("float32"), rel=0.05)


def test_other_kinds_of_devices_are_left_alone() -> None:
    cluster = Cluster.preset("a100-80", devices_per_node=2)
    assert calibrated(cluster, cpu_profile()).device_types == cluster.device_types
    empty = Profile(machine=cpu_profile().machine)
    assert calibrated(Cluster.local(2), empty) == Cluster.local(2)


def test_fitting_is_deterministic() -> None:
    ops = list(cpu_profile().ops.values())
    assert fit_device(CPU, ops) == fit_device(CPU, ops[::-1])


def optimizer_profile(*points: tuple[int, int]) -> Profile:
    records = tuple(
        OptimizerRecord(optimizer="adamw", num_tensors=tensors, nbytes=nbytes,
                        time=Timing(median_s=nbytes * 2e-9 + tensors * 3e-5, spread=0.02, count=5))
        for tensors, nbytes in points
    )  # fmt: skip
    return replace_optimizers(cpu_profile(), records)


def replace_optimizers(profile: Profile, records: tuple[OptimizerRecord, ...]) -> Profile:
    return Profile(machine=profile.machine, ops=profile.ops, optimizers=records)


def test_optimizer_time_by_profile() -> None:
    profile = optimizer_profile((10, 10**6), (100, 10**7), (10, 10**8))
    assert optimizer_time(CPU, "adamw", 10, 10**6, profile).source == "measured"
    between = optimizer_time(CPU, "adamw", 50, 3 * 10**7, profile)
    assert between.source == "fitted"
    assert between.seconds == pytest.approx(0.06 + 0.0015, rel=0.01)
    assert between.band > 0.02
    assert optimizer_time(CPU, "sgd", 50, 3 * 10**7, profile).source != "fitted"


def test_optimizer_time_by_formula() -> None:
    large = optimizer_time(A100, "adamw", 100, 4 * 10**9)
    rate = A100.memory_bandwidth_bytes_per_s * A100.curves[OpClass.ELEMENTWISE].share
    assert large.seconds == pytest.approx(7 * 4e9 / rate, rel=0.02)
    many = optimizer_time(A100, "adamw", 4000, 4 * 4000)
    assert many.seconds > 10 * optimizer_time(A100, "adamw", 40, 4 * 4000).seconds
    assert optimizer_time(A100, "adamw", 0, 0).seconds == 0.0
    sgd, rmsprop = (optimizer_time(A100, o, 400, 4 * 10**9).seconds for o in ("sgd", "rmsprop"))
    assert sgd < large.seconds < rmsprop
