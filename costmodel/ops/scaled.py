"""Products of narrower numbers than the values that they are of, which are scaled and cast before
each: torchao's linear layers of 8-bit floats."""

from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.costmodel.ops.kernel_work import forward_products
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.float8 import fits_float8
from meshwright.ir.ops import facts

AS_IT_IS = "bfloat16"
"""Values of layers whose products may be narrower."""
_SCALE = 5
"""Bytes per value of two bytes: the largest value (2), and the cast (2 + 1)."""
_TURN = 2
"""Bytes per 8-bit value that is turned, as tensor cores want them along the inner dim."""
_RESCALE = 4
"""Bytes per value of a result: backward's products accumulate slowly, where the kernel with scales
per row is so slow that torchao calls the one with a scale per tensor and multiplies its result
afterwards (torchao/float8/float8_ops.py; pytorch/ao, issue 2184)."""


def as_multiplied(op: LocalOp) -> LocalOp:
    """Returns the op with the dtype of its products on a rank: that of its values where kernels for
    8-bit floats do not take its sizes."""
    if not is_scaled(op) or all(fits_float8(gemm) for gemm in forward_products(op)):
        return op
    return op._replace(dtype=AS_IT_IS)


def is_scaled(op: LocalOp) -> bool:
    """Tells whether its operands are scaled and cast."""
    return bool(facts(op.target).scaled)


def scaling_s(op: LocalOp, device: DeviceType) -> tuple[float, float, float]:
    """Returns seconds in the forward, for gradients of activations and for those of weights. Scales
    by row are made along the other dim again for each further product."""
    by_row = facts(op.target).scaled == "row"
    x, weight = (operand.nbytes / 2 for operand in op.inputs[:2])  # values
    y = op.output_bytes / 2
    back = _SCALE * (y + weight)
    weights = _SCALE * (x + y) + _RESCALE * weight if by_row else _SCALE * x + _TURN * (x + y)
    curve = curve_of(OpClass.ELEMENTWISE, device)
    parts = (_SCALE * (x + weight), back + _RESCALE * x * by_row, weights)
    if device.casting and not by_row:  # for both products of the backward at once
        parts = (device.casting.operand * x * (not op.comes_cast), device.casting.result * y, 0.0)
    forward, inputs, own = (2 * curve.floor_s + memory_s(n, curve, device) for n in parts)
    wanted = op.differentiable and any(i.requires_grad and not i.is_param for i in op.inputs)
    trained = op.differentiable and any(i.requires_grad and i.is_param for i in op.inputs)
    return forward, inputs * wanted, own * trained
