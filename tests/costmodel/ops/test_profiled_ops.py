"""Op times from a profile: exact, interpolated, fitted; bands widen in that order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.fit.calibrated import calibrated, calibrated_device
from meshwright.costmodel.ops.compute import OpTime
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.profiled_ops import ProfileTimer, profile_timer
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.presets import DEVICES, cpu_process
from meshwright.ir.profile.profile import Machine, OpRecord, Profile, Timing

CPU = cpu_process(2**34)
MEASURED = (32, 128, 512)


def key(op: LocalOp) -> str:
    return f"{op.target}{[i.shape for i in op.inputs]}"


def linear(n: int, *, first: bool = False) -> LocalOp:
    return LocalOp(
        target="aten.linear.default",
        op_class=OpClass.MATMUL,
        dtype="float32",
        flops=2.0 * n**3,
        inputs=(LocalInput((n, n), 4 * n * n, not first, False),
                LocalInput((n, n), 4 * n * n, True, True)),
        outputs=((n, n),),
        output_bytes=4 * n * n,
        differentiable=True,
    )  # fmt: skip


def law(n: int) -> float:
    return 1e-5 + 2.0 * n**3 / 3e10


def timing(seconds: float, spread: float = 0.01) -> Timing:
    return Timing(median_s=seconds, spread=spread, count=20)


def profile(kind: str = "cpu", **rest: Timing) -> Profile:
    records = []
    for n in MEASURED:
        op = linear(n)
        records.append(
            OpRecord(key=key(op), target=op.target, op_class=op.op_class, dtype=op.dtype,
                     inputs=tuple(i.shape for i in op.inputs), flops=op.flops,
                     moved_bytes=12.0 * n * n, forward=timing(law(n)),
                     backward=timing(2.5 * law(n)), **rest)
        )  # fmt: skip
    machine = Machine(device="x", kind=kind, driver="1", torch="2", backend="gloo")  # type: ignore[arg-type]
    return Profile(machine=machine, ops={r.key: r for r in records})


def ask(op: LocalOp, device: DeviceType = CPU, **rest: Timing) -> OpTime:
    data = profile(device.kind, **rest)
    device = calibrated_device(device, data)
    time = ProfileTimer(data, device, key)(op, device)
    assert time is not None
    return time


def test_exact_shapes_are_measured() -> None:
    time = ask(linear(128))
    assert time.source == "measured" and time.forward_s == law(128)
    assert time.backward_input_s + time.backward_weight_s == pytest.approx(2.5 * law(128))
    assert time.band == pytest.approx(0.02)


def test_parts_of_the_backward_are_measured_apart() -> None:
    parts = {"backward_input": timing(1e-3), "backward_weight": timing(3e-3)}
    time = ask(linear(128), **parts)
    assert time.backward_weight_s == pytest.approx(3 * time.backward_input_s)
    assert time.backward_input_s + time.backward_weight_s == pytest.approx(2.5 * law(128))


@pytest.mark.parametrize("n", [48, 64, 200, 300])
def test_sizes_between_are_interpolated(n: int) -> None:
    time = ask(linear(n))
    assert time.source == "interpolated"
    assert time.forward_s == pytest.approx(law(n), rel=0.25)
    backward = time.backward_input_s + time.backward_weight_s
    assert backward == pytest.approx(2.5 * time.forward_s, rel=1e-6)


def test_far_sizes_are_fitted() -> None:
    time = ask(linear(4096))
    assert time.source == "fitted"
    assert time.forward_s == pytest.approx(law(4096), rel=0.3)


def test_bands_widen() -> None:
    bands = [ask(linear(n)).band for n in (512, 540, 700, 4096, 16384)]
    assert bands == sorted(set(bands))


@given(st.integers(1, 2000), st.integers(0, 500))
def test_monotone_within_what_was_measured(n: int, more: int) -> None:
    """Bounded by smaller and larger measured ops."""
    time = ask(linear(n)).forward_s
    assert time > 0.0
    for known in MEASURED:
        if n <= known and ask(linear(n)).source == "interpolated":
            assert time <= law(known) * (1 + 1e-9)
        if n >= known and ask(linear(n)).source == "interpolated":
            assert time >= law(known) * (1 - 1e-9)


def test_an_op_without_input_gradient_has_a_shorter_backward() -> None:
    whole, first = ask(linear(200)), ask(linear(200, first=True))
    assert first.backward_input_s == 0.0
    assert first.backward_weight_s == pytest.approx(whole.backward_weight_s, rel=1e-6)


def test_on_a_gpu_dispatch_stays_beside() -> None:
    device = DEVICES["a100-80"]
    for n in (128, 200):
        time = ask(linear(n), device)
        assert time.forward_dispatch_s == device.overhead_s
        assert time.weight_dispatch_s == 2 * device.overhead_s


def test_one_timer_for_all_devices_of_a_kind() -> None:
    data = profile()
    cluster = calibrated(Cluster.local(2), data)
    timer = profile_timer(data, cluster, key)
    time = timer(linear(128), cluster.device(0))
    assert time is not None and time.source == "measured"
    assert timer(linear(128), DEVICES["l4"]) is None


def test_what_the_profile_does_not_know_is_left_to_formulas() -> None:
    data = profile()
    device = calibrated_device(CPU, data)
    timer = ProfileTimer(data, device, key)
    assert timer(linear(64)._replace(target="aten.bmm.default"), device) is None
    assert timer(linear(64)._replace(dtype="float64"), device) is None
    assert timer(linear(128), DEVICES["l4"]) is None
    assert timer(linear(128)._replace(op_class=OpClass.VIEW), device) is None
