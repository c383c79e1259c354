"""Time of clipping gradients to a global norm, as `runtime.step.gradients` does it."""

from meshwright.costmodel.ops.formulas import curve_of
from meshwright.ir.cluster.device import DeviceType, OpClass

_READ, _SCALED = 1, 2
"""Passes: gradients are read for the norm, then read and written when they are scaled."""
_TENSORS_PER_LAUNCH = 32
"""As in `costmodel.ops.optimizer`: torch's multi-tensor kernels."""


def clip_time(device: DeviceType, num_tensors: int, nbytes: int, *, scales: bool = True) -> float:
    """Seconds on one rank for `nbytes` of gradients, without the sum over all ranks; `scales`:
    unless the optimizer scales what it reads."""
    if not num_tensors:
        return 0.0
    curve = curve_of(OpClass.ELEMENTWISE, device)
    calls, passes = (2, _READ + _SCALED) if scales else (1, _READ)
    moving = passes * nbytes / (device.memory_bandwidth_bytes_per_s * curve.share)
    if device.kind == "cpu":
        return moving + calls * device.overhead_s * num_tensors
    launches = calls * (1 + num_tensors / _TENSORS_PER_LAUNCH)
    return max(moving + curve.floor_s * launches, device.overhead_s * launches)
