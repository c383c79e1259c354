"""What a profile says of a preset: its curves beside what was measured, as evidence to keep.

`python -m benchmarks.gpu --fold RUN` writes a file of `ir/presets/measured` from a run's profile:
the curves that fit what was measured, with device, date and libraries. Nothing reads its numbers by
itself: whoever changes a preset does so by hand, and names the file in `Preset.evidence`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.gpu.step import Fact
from meshwright.costmodel.fit.fit_compute import fit_device, record_work
from meshwright.costmodel.ops.formulas import curve_of, kernel_s
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.cluster.host import link_rate
from meshwright.ir.errors import PlanError
from meshwright.ir.presets import DEVICES
from meshwright.ir.profile.evidence import MeasuredCurves
from meshwright.ir.profile.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow:
    """One curve of a preset beside a profile."""

    curve: str
    count: int
    """Ops, or copies, that were measured."""
    preset_over_measured: float
    """Of their times, at the median."""
    worst: float
    """The same where it is farthest from 1."""
    band: float
    """What the preset states."""
    source: str

    def facts(self) -> Iterator[Fact]:
        """Yields them as a row of a table."""
        for name, value in asdict(self).items():
            if name != "curve":
                yield f"{self.curve}/{name}", value


def curve_rows(profile: Profile, device: DeviceType) -> tuple[CurveRow, ...]:
    """By class of ops, its kernels' times by the device's curves over the measured ones."""
    found: dict[OpClass, list[float]] = {}
    for record in profile.ops.values():
        kind = OpClass(record.op_class)
        if kind is not OpClass.VIEW and record.forward.median_s > 0:
            said = kernel_s(record_work(record, device.kind), device)
            said += device.overhead_s if device.kind == "cpu" else 0.0
            found.setdefault(kind, []).append(said / record.forward.median_s)
    return tuple(
        _row(kind, ratios, curve_of(kind, device).band or 0.0, curve_of(kind, device).source)
        for kind, ratios in sorted(found.items())
    )


def link_rows(profile: Profile, device: DeviceType) -> tuple[CurveRow, ...]:
    """The link to the host, each way, by its large copies; none on CPUs."""
    rows = []
    for way in ("to_device", "to_host"):
        own = [c for c in profile.copies if c.direction == way and c.nbytes >= 2**24]
        rate = link_rate(device) if own else 1.0
        ratios = [copy.nbytes / rate / copy.time.median_s for copy in own]
        if ratios:
            rows.append(_row(f"host link {way}", ratios, 0.35, "assumption"))
    return tuple(rows)


def _row(curve: str, ratios: list[float], band: float, source: str) -> CurveRow:
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    return CurveRow(curve=str(curve), count=len(ratios), preset_over_measured=median(ratios),
                    worst=worst, band=band, source=source)  # fmt: skip


def curves_of(profile: Profile, preset: str, date: str) -> MeasuredCurves:
    """The curves that fit a profile, starting from a preset's; PlanError if it is of no GPU."""
    if preset not in DEVICES:
        raise PlanError(f"no preset {preset!r}: only runs on a device that has one can be folded")
    device = DEVICES[preset]
    if profile.machine.kind != device.kind:
        raise PlanError(f"the profile is of a {profile.machine.kind}, {preset} is a {device.kind}")
    fitted = fit_device(device, profile.ops.values())
    seen = {OpClass(record.op_class) for record in profile.ops.values()} - {OpClass.VIEW}
    return MeasuredCurves(
        preset=preset, date=date, machine=str(profile.machine), fingerprint=profile.fingerprint,
        ops=len(profile.ops), curves={k: fitted.curves[k] for k in sorted(seen)},
    )  # fmt: skip
