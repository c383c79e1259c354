"""Seconds of what a layer of experts does beside its products: pairs of a token and an expert are
put into order, gated, scaled and summed again, by kernels that only move memory.

On CPUs they are a seventh of such a layer, and functions of gates take longer than moving values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from meshwright.costmodel.ops.compute import TIMED, OpTime, dispatched
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s
from meshwright.costmodel.ops.kernel_work import forward_products
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import DTYPE_BYTES, Op
from meshwright.ir.ops.experts import scaling_on_rank
from meshwright.ir.precision import Precision, product_bytes
from meshwright.ir.styles import Style


@dataclass(frozen=True, slots=True)
class _Passes:
    """Values read and written of a pair, in widths of tokens and of what is between the products;
    and operators that make them."""

    width: float
    inner: float
    operators: int
    of_expert: int = 0
    """Operators once more for each expert of the rank."""
    curved: float = 0
    """Values as `inner` has them, of functions that CPUs compute more slowly than they move."""


_OURS = _Passes(9, 5, 20), _Passes(11, 26, 40)
"""Of a forward and a backward, counted in `ir.graph.experts`: a gate is several operators of torch,
rows that are not here are masked, and the backward takes the gate again."""
_ON_CPU = {
    False: (_Passes(7, 0, 20, 4, 2), _Passes(9, 8, 40, 8, 5)),
    True: (_Passes(7, 3, 20, 4, 2), _Passes(9, 19, 40, 8, 7)),
}
"""The same on a CPU, without a gate beside the function and with one: every pair has a row there,
none is masked, and each is added to a sum in one operator; each run of rows has its products."""
_FUSED = _Passes(4, 3, 4), _Passes(4, 5, 4)
"""One kernel each for putting into order and back, with the weights, and for the gate: Megatron-
Core's moe_utils.py (permute, sort_chunks_by_idxs) and Transformer Engine's."""
_OUR_BIASES = _Passes(4, 12, 4), _Passes(15, 18, 8)
"""More where experts have biases, counted alike: each pair's is looked up as a row and added;
gradients are summed expert by expert."""
_CPU_BIASES = {
    False: (_Passes(5, 5, 4), _Passes(9, 3, 8)),
    True: (_Passes(5, 10, 4), _Passes(9, 6, 8)),
}
"""The same on a CPU."""
_SLICED_BIASES = _Passes(14, 8, 6, 2), _Passes(20, 10, 10, 5)
"""More where experts have biases in stacks whose passes are fused: Megatron-Core's TEGroupedMLP, of
which NeMo AutoModel has a copy (`_apply_bias`), adds those of the second product to slices of
results, expert by expert, times router weights in float32, which makes the sums float32 until they
are concatenated and cast; the gate, with its limits, is made of operators. Counted in their code
with bytes of float32 twice, both ways; gradients of weights and biases are products and sums of
their own."""

_CAST = {"cuda": 5, "cpu": 22}
"""Bytes per value of two bytes that is cast to 8 bits: read for the largest, read again and written
(`ir.graph.cast_groups`); on CPUs by five operators, and wide again (`ir.graph.scaled_groups`)."""


def as_multiplied_by(local: LocalOp, op: Op, style: Style, precision: Precision) -> LocalOp:
    """Returns the op with the dtype of its products: that of a precision's linear layers, where it
    is of experts and the stack multiplies those alike; any other as it is."""
    if not (style.narrow_experts and precision.linears and op.target == EXPERTS_TARGET):
        return local
    if not scaling_on_rank(op, [given.shape for given in local.inputs]):
        return local
    return local._replace(dtype=precision.products)


def _cast_bytes(gemms: Sequence[Gemm], kind: str) -> tuple[float, float]:
    """What our casts to 8-bit floats move, forward and backward: rows that go into products and
    matrices; then gradients of results and matrices, and for gradients of weights both again."""
    *firsts, last = gemms
    pairs, width, inner = last.batch * last.m, last.n, last.k
    columns = sum(product.n for product in firsts)
    matrices = last.batch * width * (inner + columns)
    into, of = len(firsts) * width + inner, columns + width
    each = _CAST[kind]
    return each * (pairs * into + matrices), each * (pairs * (2 * of + into) + matrices)


def passes_beside(op: LocalOp, time: OpTime, device: DeviceType, style: Style) -> OpTime | None:
    """Returns what passes take of an op's forward and backward, for one micro-batch on one rank;
    None for other ops, and where its own time was measured, as that has them in it.

    Rows are as wide as tokens, so that kernels which look them up move memory as copies do.
    """
    if op.target != EXPERTS_TARGET or time.source in TIMED:
        return None
    products = forward_products(op)
    if not products:
        return None
    *firsts, last = products
    pairs, width, inner = last.batch * last.m, last.n, last.k
    gated = sum(product.n for product in firsts) > inner
    own = op.output_bytes / max(1, sum(prod(shape) for shape in op.outputs))
    wide = min(own, max(2, product_bytes(op.dtype)))  # wider results are sums of these rows
    narrow = device.casting if DTYPE_BYTES.get(op.dtype, 1) < wide else None
    counts = [0.0, 0.0]
    seconds = [0.0, 0.0]
    for i, made in enumerate(_passes(op, device, style, gated)):
        nbytes = curved = 0.0
        for passes in made:
            nbytes += pairs * (passes.width * width + passes.inner * inner) * wide
            curved += pairs * passes.curved * inner * wide
            counts[i] += passes.operators + passes.of_expert * last.batch
        if narrow:  # inputs of both products, or gradients of their results
            cast = narrow.result if i else narrow.operand
            nbytes += pairs * cast * (width + (1 + i) * inner)
        elif DTYPE_BYTES.get(op.dtype, 1) < wide and not style.fused_experts:
            nbytes += _cast_bytes(products, device.kind)[i]
            counts[i] += 2 * (1 + i) * len(products)
        seconds[i] = kernel_s(KernelWork(OpClass.COPY, op.dtype, 0.0, nbytes), device)
        if curved:
            work = KernelWork(OpClass.TRANSCENDENTAL, op.dtype, 0.0, curved)
            seconds[i] += kernel_s(work, device)
    back, curve = op.differentiable, curve_of(OpClass.COPY, device)
    cpu_s, back_s = style.experts_cpu_s
    waits_s = cpu_s if style.experts_wait else 0.0
    found = OpTime(
        seconds[0] + waits_s, seconds[1] * back, 0.0, curve.source, curve.band,
        forward_dispatch_s=cpu_s - waits_s, input_dispatch_s=back_s * back,
    )  # fmt: skip
    return dispatched(found, device, counts[0], counts[1] * back, 0)


def _passes(
    op: LocalOp, device: DeviceType, style: Style, gated: bool
) -> tuple[tuple[_Passes, ...], tuple[_Passes, ...]]:
    """Those of a forward, and of a backward."""
    if device.kind == "cpu":
        own, of_biases = _ON_CPU[gated], _CPU_BIASES[gated]
    elif style.fused_experts:
        own, of_biases = _FUSED, _SLICED_BIASES
    else:
        own, of_biases = _OURS, _OUR_BIASES
    if not any(i.is_param and len(i.shape) == 2 for i in op.inputs):
        return (own[0],), (own[1],)
    return (own[0], of_biases[0]), (own[1], of_biases[1])
