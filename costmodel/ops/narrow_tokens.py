"""Seconds of casting experts' tokens to 8-bit floats and back: for a way that they travel so, or
where they are read, if they do not. It follows `ir.graph.narrow_tokens`.
"""

from math import prod

from meshwright.costmodel.ops.compute import OpTime, dispatched
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.graph import Op
from meshwright.ir.ops.experts import has_narrow_tokens

_TO_CAST = {"cuda": 2.0, "cpu": 4.0}
"""Reads or writes of values of their own width: each is read for its row's largest and read again,
and written at the end. CPUs multiply in place once more."""
_NARROW = {"cuda": 2, "cpu": 2}
"""Bytes of a value in 8 bits that is written and read."""
_WIDE = {"cuda": 0, "cpu": 8}
"""Bytes of a value in float32, between torch's operators."""
_OPERATORS = {"cuda": 4, "cpu": 16}
"""Of a cast and the way back, those that make room among them."""


def casting(op: Op, local: LocalOp, device: DeviceType, sent: float | None) -> OpTime | None:
    """Returns what casts of an op's tokens take, and of gradients of its results, for one
    micro-batch on one rank; None for other ops. `sent`: rows that are on their way for each that is
    here; None: none travels, so each is rounded where it is read, in a backward once more."""
    if not has_narrow_tokens(op):
        return None
    kind, values = device.kind, prod(local.inputs[0].shape)
    width = local.output_bytes / max(1, prod(local.outputs[0]))
    each = (1 + _TO_CAST[kind]) * width + _NARROW[kind] + _WIDE[kind]
    times = (1.0, 2.0) if sent is None else (sent, sent)
    forward_s, backward_s = (
        kernel_s(KernelWork(OpClass.COPY, local.dtype, 0.0, n * values * each), device)
        for n in times
    )
    back, curve = local.differentiable, curve_of(OpClass.COPY, device)
    time = OpTime(forward_s, backward_s * back, 0.0, curve.source, curve.band)
    count = _OPERATORS[kind]
    return dispatched(time, device, count, count * (2 if sent is None else 1) * back, 0)
