"""An op that is made of calls of others, as those calls."""

from math import prod

from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.graph.graph import DTYPE_BYTES
from meshwright.ir.graph.op_facts import InnerCall
from meshwright.ir.ops import facts

_DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
"""By bytes of a value of the first operand, which all products are made in."""


def calls_of(op: LocalOp) -> tuple[LocalOp, ...]:
    """List what an op calls one after the other; empty if it is a call itself."""
    find = facts(op.target).made_of
    shapes = [i.shape for i in op.inputs]
    if find is None or not prod(shapes[0]):
        return ()
    dtype = _DTYPES.get(op.inputs[0].nbytes // prod(shapes[0]), op.dtype)
    return tuple(_call(op, one, dtype) for one in find(shapes))


def _call(op: LocalOp, one: InnerCall, dtype: str) -> LocalOp:
    """Values made inside have gradients as the whole op's result has."""
    width = DTYPE_BYTES[dtype]
    inputs = tuple(
        op.inputs[x] if isinstance(x, int)
        else LocalInput(x, prod(x) * width, op.differentiable, False)
        for x in one.operands
    )  # fmt: skip
    nbytes = prod(one.made) * width
    saved = sum(i.nbytes for i in inputs)
    return LocalOp(
        one.target, classify(one.target), dtype, one.flops, inputs, (one.made,), nbytes,
        op.differentiable, saved,
    )  # fmt: skip
