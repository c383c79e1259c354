"""Fits a device's curves to measured kernels: least squares on the logarithm of the error."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.ops.formulas import KernelWork, kernel_s
from meshwright.costmodel.ops.kernel_work import forward_gemms, seen_by_causal, windows
from meshwright.ir.cluster.device import COMPUTE, DeviceType, OpClass, OpCurve, Source
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import DTYPE_BYTES
from meshwright.ir.profile.profile import OpRecord

Floats = NDArray[np.float64]

_RANGE = {
    "share": (1e-3, 1.5),
    "wide_share": (1e-3, 1.5),
    "floor_s": (1e-8, 1e-2),
    "depth": (0.1, 4096.0),
    "split_depth": (1.0, 4096.0),
    "quantum": (1e-3, 1.0),
    "small_tile": (0.3, 1.0),
    "droop": (1e-3, 0.6),
    "cache_bytes": (2.0**12, 2.0**28),
    "cache_share": (1e-3, 100.0),
}
"""Where each parameter may lie: within it every formula is non-negative and monotone."""
_TILED = ("share", "floor_s", "depth", "quantum", "small_tile", "split_depth", "droop")
_PLAIN = ("share", "floor_s", "depth")
_MEMORY = ("share", "floor_s", "cache_share", "cache_bytes")
_OUTLIER = 0.1
"""Errors far above this count less than their square: kernels chosen badly by the library."""
_SAFE = 1.25
"""Bands are of shapes that were fitted; others are a little worse."""
_MOST_BAND = 3.0
_CACHES = (2.0**17, 2.0**20, 2.0**23)
"""Where the search for the cache's size starts: its effect is too abrupt to be found from afar."""
_KERNEL_S = 1e-6
_WIDE = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One kernel and what it took."""

    work: KernelWork
    seconds: float
    dispatch_s: float = 0.0
    """How much of that the cost model accounts as dispatch (on a CPU)."""


def fit_curve(
    op_class: OpClass,
    samples: Sequence[KernelTiming],
    device: DeviceType,
    start: OpCurve,
    *,
    source: Source = "fitted",
    reference: str = "",
) -> OpCurve:
    """The curve of the class that fits the samples best, starting from another.

    The floor of a GPU's kernels is not fitted below a microsecond: none is shorter.

    As many parameters as the samples can tell apart: one size tells the share alone.
    """
    names = _free(op_class, samples, device, start)
    residuals = _residuals(op_class, samples, device, start, names)
    ranges = [_range(name, device) for name in names]
    tried = [_minimise(residuals, first, ranges) for first in _starts(start, names)]
    found, errors = min(tried, key=lambda t: _cost(t[1]))
    curve = _with(start, names, found)
    band = _residual_band(samples, errors, len(names))
    return replace(curve, band=band, source=source, reference=reference)


def _residual_band(samples: Sequence[KernelTiming], errors: Floats, parameters: int) -> float:
    """What four fifths of the samples are within, where the kernel and not its dispatch decides."""
    judged = [abs(np.expm1(e)) for s, e in zip(samples, errors, strict=True)
              if s.seconds > 2.0 * s.dispatch_s] or [1.0]  # fmt: skip
    # With hardly more samples than parameters the residual says little.
    few = 1.0 + parameters / len(samples)
    spread = float(np.quantile(judged, 0.8))
    return min(_MOST_BAND, max(0.02, _SAFE * few * spread, 0.3 / len(samples)))


def _starts(start: OpCurve, names: Sequence[str]) -> list[list[float]]:
    first = {name: getattr(start, name) or 0.0 for name in names}
    if "cache_share" in names:
        first["cache_share"] = first["cache_share"] or 2.0 * start.share
    if "cache_bytes" not in names:
        return [list(first.values())]
    return [list((first | {"cache_bytes": nbytes}).values()) for nbytes in _CACHES]


def _range(name: str, device: DeviceType) -> tuple[float, float]:
    low, high = _RANGE[name]
    return (
        (max(low, _KERNEL_S), high) if name == "floor_s" and device.kind == "cuda" else (low, high)
    )


def _free(
    op_class: OpClass, samples: Sequence[KernelTiming], device: DeviceType, start: OpCurve
) -> tuple[str, ...]:
    sizes = {round(log(max(1.0, s.work.flops + s.work.nbytes)), 1) for s in samples}
    tiled = device.processors and all(s.work.gemms for s in samples)
    names: tuple[str, ...] = _MEMORY
    if op_class in COMPUTE:
        names = _TILED if tiled and len(samples) > 3 * len(_TILED) else _PLAIN
    dtypes = {s.work.dtype in _WIDE for s in samples}
    mixed = ("wide_share",) if op_class in COMPUTE and len(dtypes) == 2 else ()
    count = len(names) if len(sizes) > len(names) else min(len(sizes), 2)
    if names is _MEMORY and len(sizes) in (3, 4) and start.cache_bytes:
        count = 3  # the cache's size is taken as given
    free = names[:count] + mixed
    if op_class in COMPUTE and dtypes == {True} and start.wide_share is not None:
        free = ("wide_share", *free[1:])  # they say nothing of the other one
    return free


def _with(curve: OpCurve, names: Sequence[str], logs: Floats) -> OpCurve:
    values: dict[str, Any] = {name: float(np.exp(x)) for name, x in zip(names, logs, strict=True)}
    if "cache_bytes" in values:
        values["cache_bytes"] = round(values["cache_bytes"])
    if "cache_share" in values:
        # Memory is never faster than the cache before it.
        values["cache_share"] = max(values["cache_share"], values["share"])
    elif "share" in values and curve.cache_share:
        # Nothing tells the cache: keep its advantage.
        values["cache_share"] = values["share"] * curve.cache_share / curve.share
    return replace(curve, **values)


def _residuals(
    op_class: OpClass,
    samples: Sequence[KernelTiming],
    device: DeviceType,
    start: OpCurve,
    names: Sequence[str],
) -> Callable[[Floats], Floats]:
    measured = np.log([s.seconds for s in samples])

    def residuals(logs: Floats) -> Floats:
        curves = {**device.curves, op_class: _with(start, names, logs)}
        scene = replace(device, curves=curves)
        return np.log([kernel_s(s.work, scene) + s.dispatch_s for s in samples]) - measured

    return residuals


def _minimise(
    residuals: Callable[[Floats], Floats],
    start: Sequence[float],
    ranges: Sequence[tuple[float, float]],
) -> tuple[Floats, Floats]:
    """Levenberg-Marquardt on log parameters within their ranges; deterministic."""
    low, high = (np.log([r[side] for r in ranges]) for side in (0, 1))
    x = np.clip(np.log(np.maximum(start, np.exp(low))), low, high)
    error, damping = residuals(x), 1e-2
    for _ in range(60):
        slope = _slope(residuals, x, error, low, high)
        weight = 1.0 / np.sqrt(1.0 + (error / _OUTLIER) ** 2)
        normal, pull = slope.T @ (weight[:, None] * slope), slope.T @ (weight * error)
        moved = False
        while damping < 1e8 and not moved:
            scale = np.diag(damping * (np.diag(normal) + 1e-9) + 1e-12)
            step = np.clip(-np.linalg.solve(normal + scale, pull), -0.7, 0.7)
            there = np.clip(x + step, low, high)
            tried = residuals(there)
            moved = _cost(tried) < _cost(error)
            damping *= 0.2 if moved else 4.0
        if not moved:
            break
        done = _cost(error) - _cost(tried) < 1e-7 * _cost(error)
        x, error = there, tried
        if done:
            break
    return x, error


def _slope(
    residuals: Callable[[Floats], Floats],
    x: Floats,
    error: Floats,
    low: Floats,
    high: Floats,
) -> Floats:
    """Derivative of each residual; wide steps, since waves and choices of tile are jagged."""
    columns = []
    for i in range(len(x)):
        step = 0.02 if x[i] + 0.02 <= high[i] else -0.02
        there = x.copy()
        there[i] += step
        columns.append((residuals(there) - error) / step)
    return np.array(columns).T


def _cost(error: Floats) -> float:
    return float(np.sum(np.sqrt(1.0 + (error / _OUTLIER) ** 2) - 1.0))


def record_work(record: OpRecord, kind: str) -> KernelWork:
    """The forward of an op that was measured on a kind of device."""
    op_class = OpClass(record.op_class)
    gemms: tuple[Gemm, ...] = ()
    if op_class in (OpClass.MATMUL, OpClass.CONVOLUTION):
        gemms = forward_gemms(record.target, record.inputs, record.flops)
    keys = record.inputs[1][-2] if op_class is OpClass.ATTENTION and len(record.inputs) > 1 else 0
    skipped = seen_by_causal(keys, kind) if record.causal else 1.0
    flops = record.flops * skipped
    moved = record.moved_bytes
    if op_class is not OpClass.CONVOLUTION:
        return KernelWork(op_class, record.dtype, flops, moved, gemms, keys * skipped)
    small, images, results = windows(record.inputs, record.flops)
    # Images come as results go, but for a model's first, which have few channels.
    turned = 0 if record.channels_last else (images + results) * DTYPE_BYTES[record.dtype]
    return KernelWork(
        op_class, record.dtype, flops, moved, gemms, small_window=small, turned_bytes=turned
    )


def fit_device(device: DeviceType, records: Iterable[OpRecord]) -> DeviceType:
    """The device with curves fitted to a profile's ops; classes without records keep theirs."""
    by_class: dict[OpClass, list[OpRecord]] = {}
    for record in sorted(records, key=lambda r: r.key):
        by_class.setdefault(OpClass(record.op_class), []).append(record)
    by_class.pop(OpClass.VIEW, None)
    # Compute classes lean on the copy curve for their memory traffic: the others come first.
    order = sorted(by_class, key=lambda c: (c in COMPUTE, c))
    for op_class in order:
        curve = _fit_class(op_class, by_class[op_class], device)
        device = replace(device, curves={**device.curves, op_class: curve})
    return device


def _fit_class(op_class: OpClass, records: Sequence[OpRecord], device: DeviceType) -> OpCurve:
    # On a CPU a measured op includes its dispatch, which the cost model adds again.
    dispatch = device.overhead_s if device.kind == "cpu" else 0.0
    samples = [
        KernelTiming(record_work(r, device.kind), r.forward.median_s, dispatch) for r in records
    ]
    start = device.curves.get(op_class) or OpCurve(share=device.efficiency.get(op_class, 0.5))
    reference = f"{len(records)} ops of a profile"
    return fit_curve(op_class, samples, device, start, reference=reference)
