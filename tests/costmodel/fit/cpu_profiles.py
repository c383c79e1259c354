"""A profile of ops as a CPU would give it."""

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.profile.profile import Machine, OpRecord, Profile, Timing


def record(target: str, op_class: OpClass, shapes: tuple[tuple[int, ...], ...], flops: float,
           moved: float, seconds: float) -> OpRecord:  # fmt: skip
    return OpRecord(
        key=f"{target}{shapes}", target=target, op_class=op_class, dtype="float32", inputs=shapes,
        flops=flops, moved_bytes=moved, forward=Timing(median_s=seconds, spread=0.02, count=9),
        backward=None,
    )  # fmt: skip


def cpu_profile(peak: float = 4e10, rate: float = 6e9, dispatch: float = 2e-5) -> Profile:
    """What a core of that speed would be measured to take."""
    records = []
    for n in (32, 64, 128, 256, 512, 1024):
        flops, moved = 2.0 * n**3, 12.0 * n * n
        shapes = ((n, n), (n, n))
        records.append(record("aten.linear.default", OpClass.MATMUL, shapes, flops, moved,
                              dispatch + flops / peak))  # fmt: skip
        count = 64 * n * n
        records.append(record("aten.gelu.default", OpClass.TRANSCENDENTAL, ((count,),), 0.0,
                              8.0 * count, dispatch + 8.0 * count / rate))  # fmt: skip
    machine = Machine(device="a CPU", kind="cpu", driver="6", torch="2", backend="gloo", cores=2)
    return Profile(machine=machine, ops={r.key: r for r in records})
