"""Seconds of one kernel from what it has to do and its device's curves.

Monotone in the work, among products whose rows are aligned alike.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, inf

from meshwright.ir.cluster.device import COMPUTE, DeviceType, OpClass, OpCurve, Source
from meshwright.ir.graph.gemm import Gemm

SOURCE_BAND: dict[Source, float] = {
    "measured": 0.05,
    "interpolated": 0.1,
    "fitted": 0.2,
    "datasheet": 0.3,
    "assumption": 0.5,
}
"""Relative error to expect of a time whose source says nothing more exact; assumptions."""

_TILES = ((256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2), (64, 128, 2))
"""Rows, columns, and how often they were halved, of the tiles that matmul kernels come in."""
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SPLIT_WAVES = 4
"""No kernel splits the inner loop of a product with more tiles than this many waves."""
_WIDE = frozenset({"float32", "float64"})
ROW = 8
"""Values of two bytes that tensor cores are fed at a time: 16 bytes."""
_NARROW = frozenset({"float8_e4m3fn", "float8_e5m2"})
_HALF = frozenset({"float16", "bfloat16"})
_DROOP_S = 1e-3
"""Ops longer than this feel the clock fall; of the order of a power controller's period."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What one kernel, or a few of one kind, has to do."""

    op_class: OpClass
    dtype: str
    flops: float
    nbytes: float
    """Read and written."""
    gemms: tuple[Gemm, ...] = ()
    """The products it consists of, if that is known."""
    depth: float = 0.0
    """Steps of the inner loop where there are no gemms; 0: unknown."""
    small_window: bool = False
    """A convolution of 3 x 3 at stride 1."""
    turned_bytes: float = 0.0
    """Images and results of a convolution, which come with their channels apart (NCHW) where
    tensor cores want them together."""


@lru_cache(maxsize=1024)
def _flat(share: float, source: Source) -> OpCurve:
    return OpCurve(share=share, band=SOURCE_BAND[source], source=source)


def curve_of(op_class: OpClass, device: DeviceType) -> OpCurve:
    """The curve of a class; where the device has none, its flat efficiency."""
    curve = device.curves.get(op_class)
    return curve or _flat(device.efficiency.get(op_class, 1.0), device.source)


def kernel_s(work: KernelWork, device: DeviceType) -> float:
    """Seconds on the device, dispatch left out."""
    curve = curve_of(work.op_class, device)
    if work.op_class not in COMPUTE:
        return curve.floor_s + memory_s(work.nbytes, curve, device)
    arithmetic = _arithmetic_s(work, curve, device)
    copies = curve_of(OpClass.COPY, device)
    moving = memory_s(work.nbytes, copies, device)
    busy = in_one_kernel_s(arithmetic, moving)
    if work.gemms:
        busy += curve.packing * moving
    if work.turned_bytes and _tensor_cores(work, device):
        busy += memory_s(2 * curve.turning * work.turned_bytes, copies, device)
    seconds: float = curve.floor_s + busy * (1.0 + curve.droop * busy / (busy + _DROOP_S))
    return seconds


def in_one_kernel_s(arithmetic_s: float, moving_s: float) -> float:
    """Seconds of both, where neither hides the other wholly if they take as long: a smooth
    maximum."""
    seconds: float = (arithmetic_s**4 + moving_s**4) ** 0.25
    return seconds


def memory_s(nbytes: float, curve: OpCurve, device: DeviceType) -> float:
    """Seconds to move bytes: those that fit into the cache at its rate, the rest at memory's."""
    rate = device.memory_bandwidth_bytes_per_s
    if not curve.cache_share:
        return nbytes / (rate * curve.share)
    near = min(nbytes, curve.cache_bytes)
    return near / (rate * curve.cache_share) + (nbytes - near) / (rate * curve.share)


def _rate(work: KernelWork, curve: OpCurve, device: DeviceType) -> tuple[float, float]:
    """(FLOP/s, share of the curve's depths): starting and ending a product takes as long at any
    rate, so that it stands for fewer steps where no tensor cores are used."""
    peak = _peak(work, device)
    if work.dtype in _NARROW and curve.narrow_share is not None:
        return peak * curve.narrow_share, 1.0
    if work.dtype not in _WIDE or curve.wide_share is None:
        return peak * curve.share, 1.0
    cores = _tensor_cores(work, device)
    rate = peak * (curve.share if cores else curve.wide_share)
    if device.kind == "cpu":
        return rate, 1.0
    start = min(1.0, rate / (device.peak("float16") * curve.share))
    plain = work.dtype == "float32" and not cores
    return rate * (curve.winograd if work.small_window and plain else 1.0), start


def _peak(work: KernelWork, device: DeviceType) -> float:
    # cuDNN may use TF32 by default where cuBLAS may not.
    tf32 = work.op_class is OpClass.CONVOLUTION and work.dtype == "float32"
    return device.peak("tf32" if tf32 and "tf32" in device.peak_flops else work.dtype)


def _tensor_cores(work: KernelWork, device: DeviceType) -> bool:
    """Whether the work's format is one that tensor cores take; TF32 reaches the same share of its
    peak as half precision (matmuls of A100, H100, L4 and RTX 3080 to 5090)."""
    return _peak(work, device) > device.peak("float32")


def _arithmetic_s(work: KernelWork, curve: OpCurve, device: DeviceType) -> float:
    rate, start = _rate(work, curve, device)
    if work.gemms and device.processors:
        half = work.dtype in _HALF
        seconds = sum(
            max(
                _waves_s(g, curve, rate, device.processors, start),
                2.0 * g.batch * g.m * g.n * g.k / row_rate(g, curve) if half else 0.0,
            )
            for g in work.gemms
        )
        if any(max(g.packed) > 1 for g in work.gemms):
            # Kernels for few channels a group need no tensor cores.
            plain = device.peak("float32") * (curve.wide_share or curve.share)
            seconds = min(seconds, work.flops / plain)
        return seconds
    if work.gemms:
        depth = start * curve.depth
        return sum(2.0 * g.batch * g.m * g.n * (g.k + depth) for g in work.gemms) / rate
    return work.flops * (1.0 + curve.depth / work.depth if work.depth else 1.0) / rate


def row_rate(gemm: Gemm, curve: OpCurve) -> float:
    """FLOP/s that a product of two-byte values reaches at most, whose rows begin at addresses that
    kernels cannot load from whole; infinite for any other."""
    rates = (curve.batched_row_rates if gemm.batch > 1 else ()) or curve.row_rates
    begins = 2 * gcd(gemm.row, ROW)
    return next((rate for nbytes, rate in rates if begins <= nbytes), inf)


@lru_cache(maxsize=1 << 16)
def _waves_s(gemm: Gemm, curve: OpCurve, rate: float, processors: int, start: float) -> float:
    """Seconds of the best choice of tile and of parts of the inner loop.

    Tiles go over the processors in waves, the last of which may be nearly empty; a product of few
    tiles splits its inner loop to occupy more processors. Each choice is monotone in m, n and k,
    so the best of them is too.
    """
    gemm, best = gemm.in_tiles(), float("inf")
    for rows, columns, halved in _TILES:
        tiles = gemm.batch * ceil(gemm.m / rows) * ceil(gemm.n / columns)
        step_s = 2.0 * rows * columns * processors / (rate * curve.small_tile**halved)
        for parts in _SPLITS:
            if parts > 1 and tiles * parts > _SPLIT_WAVES * processors:
                break
            filled = tiles * parts / processors
            waves = curve.quantum * ceil(filled) + (1.0 - curve.quantum) * max(1.0, filled)
            steps = gemm.k / parts + start * (curve.depth + curve.split_depth * (parts > 1))
            best = min(best, waves * step_s * steps)
    return best
