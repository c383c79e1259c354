"""Time of clipping gradients to a global norm, as `runtime.gradients` does it."""

from meshwright.costmodel.formulas import curve_of
from meshwright.ir.device import DeviceType, OpClass

_PASSES = 3
"""Gradients are read for the norm, then read and written when they are scaled."""
_CALLS = 2
_TENSORS_PER_LAUNCH = 32
"""As in `costmodel.optimizer`: torch's multi-tensor kernels."""


def clip_time(device: DeviceType, num_tensors: int, nbytes: int) -> float:
    """Seconds on one rank for `nbytes` of gradients, without the sum over all ranks."""
    if not num_tensors:
        return 0.0
    curve = curve_of(OpClass.ELEMENTWISE, device)
    moving = _PASSES * nbytes / (device.memory_bandwidth_bytes_per_s * curve.share)
    if device.kind == "cpu":
        return moving + _CALLS * device.overhead_s * num_tensors
    launches = _CALLS * (1 + num_tensors / _TENSORS_PER_LAUNCH)
    return max(moving + curve.floor_s * launches, device.overhead_s * launches)
