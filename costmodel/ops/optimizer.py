"""Time of an optimizer step: passes over the state, and a little for every tensor.

The runtime asks torch for its fused kernels wherever the optimizer has them: each value is read and
written once per step. Others run op by op (`foreach` on a GPU), each op a pass of its own; so do
optimizers that the user brings.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from meshwright.costmodel.memory.memory import optimizer_traffic
from meshwright.costmodel.ops.formulas import SOURCE_BAND, KernelWork, curve_of, kernel_s, memory_s
from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.updates import update
from meshwright.ir.cluster.device import LINK_BAND, DeviceType, HostShare, OpClass, Source
from meshwright.ir.graph.graph import DTYPE_BYTES
from meshwright.ir.profile.profile import OptimizerRecord, Profile

_TENSORS_PER_LAUNCH = 32
"""A fused kernel takes this many tensors at once (torch's multi-tensor lists hold 24 to 110)."""
_STEP_DISPATCHES = 25
"""Assumption: Python of `Optimizer.step`, in ops' dispatches."""
_HOST_PER_TENSOR = 0.3
"""Assumption: gathering one tensor and its state into the lists, in ops' dispatches."""
_CPU_PER_TENSOR = 0.5
"""The same on a CPU, all that a fused step takes beside its traffic: 5 us where ops took 10 (AdamW
over 77 tensors of 64 values and more, torch 2.13, 2-core cloud machine, 2026-11-26)."""
_CPU_PER_KERNEL = 0.2
"""Of a step that is not fused, each kernel on one tensor: RMSprop's six took 10 to 13 us a tensor,
there and then."""
_LEAST_BAND = 0.05


@dataclass(frozen=True, slots=True)
class OptimizerTime:
    """Seconds of one step on one rank."""

    seconds: float
    band: float
    source: Source


def optimizer_time(
    device: DeviceType,
    optimizer: str,
    num_tensors: int,
    nbytes: int,
    profile: Profile | None = None,
    host: HostShare | None = None,
) -> OptimizerTime:
    """One step over `num_tensors` tensors of parameters, `nbytes` in all (after ZeRO's split);
    `host`: what steps them, if it is not the device."""
    if not num_tensors or not nbytes:
        return OptimizerTime(0.0, 0.0, "measured")
    if host is not None and device.kind != "cpu":
        moving_s = optimizer_traffic(nbytes, optimizer) / host.update_bytes_per_s
        seconds = moving_s + device.overhead_s * (_STEP_DISPATCHES + num_tensors)
        return OptimizerTime(seconds, LINK_BAND[host.source], host.source)
    records = [r for r in profile.optimizers if r.optimizer == optimizer] if profile else []
    if records:
        return _from_records(records, num_tensors, nbytes)
    seconds = _formula(device, optimizer, num_tensors, nbytes)
    curve = curve_of(OpClass.ELEMENTWISE, device)
    return OptimizerTime(seconds, max(curve.band, SOURCE_BAND[curve.source]), curve.source)


def casting_s(device: DeviceType, host: HostShare | None, nbytes: float, copied: float) -> float:
    """Returns the seconds in which the host makes copies, of `copied` bytes a byte, of what it has
    stepped."""
    return host_work_s(device, host, (1.0 + copied) * nbytes)


def host_work_s(device: DeviceType, host: HostShare | None, moved: float) -> float:
    """Returns the seconds in which a device's host reads and writes so many bytes in all."""
    if host is not None and device.kind != "cpu":
        return moved / host.update_bytes_per_s
    return memory_s(moved, curve_of(OpClass.COPY, device), device) if moved else 0.0


def products_s(
    device: DeviceType, optimizer: str, shapes: Sequence[tuple[tuple[int, ...], str]]
) -> float:
    """Returns the seconds of products of matrices within a step, over parameters of some shapes and
    dtypes."""
    form = update(optimizer)
    if form.products is None:
        return 0.0
    found = 0.0
    for (shape, dtype), count in Counter(shapes).items():
        own, kind = tuple(form.products(shape)), form.products_in or dtype
        flops = sum([2.0 * g.batch * g.m * g.n * g.k for g in own])
        values = sum([g.batch * (g.m * g.k + g.k * g.n + g.m * g.n) for g in own])
        work = KernelWork(OpClass.MATMUL, kind, flops, DTYPE_BYTES[kind] * values, own)
        found += count * kernel_s(work, device)
    return found


def temporary_bytes(
    device: DeviceType,
    optimizer: str,
    nbytes: int,
    largest_bytes: int,
    shapes: Sequence[Shaped] = (),
) -> int:
    """What the step holds besides: on a GPU of all tensors together, else of one at a time.
    `shapes`: for optimizers whose `room` depends on them."""
    form = update(optimizer)
    if form.room is not None and shapes:
        found = {form.room(x.shape, x.nbytes // max(1, prod(x.shape))) for x in set(shapes)}
        return ceil(max(found))
    return ceil(form.made * (nbytes if device.kind == "cuda" else min(nbytes, largest_bytes)))


def _formula(device: DeviceType, optimizer: str, num_tensors: int, nbytes: int) -> float:
    curve = curve_of(OpClass.ELEMENTWISE, device)
    ops = update(optimizer).launches
    # The state is larger than any cache when its turn comes: the rate of memory.
    moving = optimizer_traffic(nbytes, optimizer) / device.memory_bandwidth_bytes_per_s
    if device.kind == "cpu" and ops == 1:  # which writes where it has read: all of the rate
        return moving + _CPU_PER_TENSOR * device.overhead_s * num_tensors
    moving /= curve.share
    if device.kind == "cpu":
        return moving + _CPU_PER_KERNEL * ops * device.overhead_s * num_tensors
    launches = num_tensors / (1 if update(optimizer).one_by_one else _TENSORS_PER_LAUNCH)
    host = _STEP_DISPATCHES + _HOST_PER_TENSOR * num_tensors
    if ops > 1:
        launches *= ops
        host += launches
    return max(moving + curve.floor_s * launches, device.overhead_s * host)


def _from_records(
    records: Sequence[OptimizerRecord], num_tensors: int, nbytes: int
) -> OptimizerTime:
    """Seconds per byte and per tensor that fit the records best, neither negative."""
    for r in records:
        if r.nbytes == nbytes and r.num_tensors == num_tensors:
            return OptimizerTime(r.time.median_s, max(_LEAST_BAND, r.time.spread), "measured")
    per_byte, per_tensor = _fit(records)
    off = [
        abs((per_byte * r.nbytes + per_tensor * r.num_tensors) / r.time.median_s - 1.0)
        for r in records
    ]
    band = max(_LEAST_BAND, *off) + 0.1 / len(records)
    seconds = per_byte * nbytes + per_tensor * num_tensors
    return OptimizerTime(seconds, band, "fitted")


def _fit(records: Sequence[OptimizerRecord]) -> tuple[float, float]:
    """Least squares on relative errors: a = bytes, b = tensors, both over seconds."""
    rows = [(r.nbytes / r.time.median_s, r.num_tensors / r.time.median_s) for r in records]
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, a1, b1 = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    det = aa * bb - ab * ab
    if det > 1e-9 * aa * bb:
        per_byte, per_tensor = (a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det
        if per_byte >= 0.0 and per_tensor >= 0.0:
            return per_byte, per_tensor
        if per_byte < 0.0:
            return 0.0, b1 / bb
    return a1 / aa, 0.0
