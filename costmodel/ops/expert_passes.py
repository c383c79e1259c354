"""Seconds of what a layer of experts does on a GPU beside its products: pairs of a token and an
expert are put into order, gated, scaled and summed again, by kernels that only move memory.

On CPUs, where a product takes many times as long as such a pass, they are not told apart.
"""

from dataclasses import dataclass

from meshwright.costmodel.ops.compute import TIMED, OpTime, dispatched
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s
from meshwright.costmodel.ops.kernel_work import forward_products
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.experts import EXPERTS
from meshwright.ir.graph.graph import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class _Passes:
    """Values read and written of a pair, in widths of tokens and of what is between the products;
    and operators that make them."""

    width: float
    inner: float
    operators: int


_OURS = _Passes(9, 5, 20), _Passes(11, 26, 40)
"""Of a forward and a backward, counted in `ir.graph.experts`: a gate is several operators of torch,
rows that are not here are masked, and the backward takes the gate again."""
_FUSED = _Passes(4, 3, 4), _Passes(4, 5, 4)
"""One kernel each for putting into order and back, with the weights, and for the gate: Megatron-
Core's moe_utils.py (permute, sort_chunks_by_idxs) and Transformer Engine's."""


def passes_beside(op: LocalOp, time: OpTime, device: DeviceType, fused: bool) -> OpTime | None:
    """Returns what passes take of an op's forward and backward, for one micro-batch on one rank;
    None for other ops, on CPUs, and where its own time was measured, as that has them in it.
    `fused`: as stacks do whose kernels do each in one pass."""
    if time.source in TIMED or device.kind == "cpu" or op.target != str(EXPERTS):
        return None
    products = forward_products(op)
    if not products:
        return None
    last = products[-1]
    pairs, width, inner = last.batch * last.m, last.n, last.k
    curve = curve_of(OpClass.GATHER, device)
    forward, backward = _FUSED if fused else _OURS

    def seconds(passes: _Passes) -> float:
        nbytes = pairs * (passes.width * width + passes.inner * inner) * DTYPE_BYTES[op.dtype]
        return kernel_s(KernelWork(OpClass.GATHER, op.dtype, 0.0, nbytes), device)

    back = op.differentiable
    found = OpTime(
        seconds(forward), seconds(backward) if back else 0.0, 0.0, curve.source, curve.band
    )
    return dispatched(found, device, forward.operators, backward.operators * back, 0)
