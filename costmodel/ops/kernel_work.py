"""What the kernels of an op have to do, forward and backward, from its local shapes."""

from collections.abc import Sequence
from math import prod

from meshwright.costmodel.ops.formulas import KernelWork
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.ir.cluster.device import COMPUTE, OpClass
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import DTYPE_BYTES
from meshwright.ir.ops import facts
from meshwright.ir.precision import product_bytes

Shape = tuple[int, ...]

_ATTENTION_BACKWARD = 2.5
"""Flash attention recomputes the scores: 5 matmuls against 2 (Dao 2023, section 3)."""
_SKIPPED_BY_CAUSAL = 0.5
_KEYS_AT_ONCE = 512
"""Keys that torch's attention on CPUs looks at together, seen or not (FlashAttentionKernel.cpp,
kvSplitSize): of 256 keys causal attention takes as long as any other, of 1,024 0.77 of that."""


def seen_by_causal(keys: int, kind: str) -> float:
    """Share of its scores that causal attention computes on a kind of device."""
    if kind != "cpu":
        return _SKIPPED_BY_CAUSAL
    return min(1.0, 0.5 + 0.5 * _KEYS_AT_ONCE / keys) if keys else 1.0


def as_attended(op: LocalOp, kind: str) -> LocalOp:
    """The op as one that skips no scores where a kind of device skips fewer than half of them."""
    if kind != "cpu" or not op.causal:
        return op
    return op._replace(causal=False, flops=op.flops * seen_by_causal(_keys(op), kind))


def forward_gemms(target: str, shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """The matrix products of an op from its operands' local shapes; empty if unknown."""
    count = facts(target).products
    return count(shapes, flops) if count else ()


def forward_products(op: LocalOp) -> tuple[Gemm, ...]:
    """The matrix products of the forward; empty if unknown."""
    return _gemms(op)


def forward_work(op: LocalOp) -> KernelWork:
    """All of the forward."""
    read = sum(i.nbytes for i in op.inputs)
    if op.op_class is OpClass.GATHER:
        # Only the rows that are asked for are read.
        read = op.output_bytes + sum(i.nbytes for i in op.inputs if not i.is_param)
    moved = read + op.output_bytes + _logarithms(op) + 2 * inside_bytes(op, at_once=False)
    gemms = _gemms(op)
    return _work(op, _flops(op), _of_several(op, gemms) or moved, gemms)


def input_work(op: LocalOp) -> KernelWork | None:
    """The gradients of the activations; None if there are none, or they cost no kernel."""
    wanted = _wanted(op, params=False)
    if not wanted or _passes_on(op, wanted):
        return None
    # What is added has one gradient, which both get.
    grads = (max if facts(op.target).backward == "shared" else sum)(i.nbytes for i in wanted)
    if op.op_class is OpClass.GATHER:
        return _work(op, 0.0, 2 * op.output_bytes + grads)
    flops = _flops(op)
    if op.op_class is OpClass.ATTENTION:
        flops *= _ATTENTION_BACKWARD
    between = not any(i.is_param for i in op.inputs)  # both factors are activations
    if op.op_class is not OpClass.ATTENTION and between:
        flops *= sum(len(i.shape) > 1 for i in wanted)
    window = _window(op)
    gemms = tuple(g.for_input(window) for g in _gemms(op))
    if op.op_class is OpClass.MATMUL and between and len(_matrices(wanted)) > 1:
        gemms += _weight_gemms(op)
    passed = 2 * _logarithms(op)  # their gradient, written and read
    passed += 2 * inside_bytes(op, at_once=False)
    moved = op.output_bytes + _saved(op) + grads + passed
    return _work(op, flops, _of_several(op, gemms) or moved, gemms)


def weight_work(op: LocalOp) -> KernelWork | None:
    """The gradients of the parameters."""
    wanted = _wanted(op, params=True)
    if not wanted:
        return None
    read = op.output_bytes + sum(i.nbytes for i in op.inputs if not i.is_param)
    if facts(op.target).fused:
        read = 0  # in the same pass as the gradients of the activations
    products = bool(_matrices(wanted)) and op.op_class in COMPUTE
    gemms = _weight_gemms(op) if products else ()
    flops = op.flops if products else 0.0
    moved = _of_several(op, gemms) or read + sum(i.nbytes for i in wanted)
    return _work(op, flops, moved, gemms)


def _of_several(op: LocalOp, gemms: Sequence[Gemm]) -> int:
    """Bytes of products one after the other inside of one op, as of experts: each reads both of its
    operands and writes what the next one reads, of which the op's own operands and results say
    nothing. 0 where the op is one product."""
    if len(_gemms(op)) < 2:
        return 0
    read = product_bytes(op.dtype)
    written = max(2, read)
    return sum(g.batch * (read * (g.m * g.k + g.k * g.n) + written * g.m * g.n) for g in gemms)


def inside_bytes(op: LocalOp, *, at_once: bool) -> int:
    """Of what a call makes and reads inside of it: all, or the most that is there at once."""
    count = facts(op.target).inside
    if count is None:
        return 0
    return count([i.shape for i in op.inputs])[at_once] * DTYPE_BYTES[op.dtype]


def accumulate_bytes(op: LocalOp) -> int:
    """Moved to add the parameters' gradients to those of earlier micro-batches."""
    return sum(
        3 * (i.cast_bytes - i.nbytes if i.cast_bytes else i.nbytes)
        for i in _wanted(op, params=True)
    )


def wanted_inputs(op: LocalOp) -> int:
    """How many activations get a gradient from a kernel."""
    wanted = _wanted(op, params=False)
    if facts(op.target).fused:
        return min(1, len(wanted))
    return 0 if _passes_on(op, wanted) else len(wanted)


def wanted_weights(op: LocalOp) -> int:
    """How many parameters get a gradient."""
    return len(_wanted(op, params=True))


def _wanted(op: LocalOp, *, params: bool) -> list[LocalInput]:
    if not op.differentiable:
        return []
    return [i for i in op.inputs if i.requires_grad and i.is_param is params]


def _passes_on(op: LocalOp, wanted: Sequence[LocalInput]) -> bool:
    how = facts(op.target).backward
    if not how.startswith("handed on") or not op.outputs:
        return False
    # A smaller operand was broadcast: its gradient is a sum.
    return how == "handed on" or all(prod(i.shape) == prod(op.outputs[0]) for i in wanted)


def _matrices(inputs: Sequence[LocalInput]) -> list[LocalInput]:
    return [i for i in inputs if len(i.shape) > 1]


def gradients_inside(op: LocalOp) -> int:
    """Bytes of a backward that are there at once beside what the op has kept: of a loss, the
    gradient of its logarithms, and out of it that of its logits."""
    return 2 * _logarithms(op)


def _logarithms(op: LocalOp) -> int:
    """Bytes of a loss's table of logarithms, as large as its logits."""
    return op.inputs[0].nbytes if facts(op.target).logarithms else 0


def _saved(op: LocalOp) -> int:
    if op.op_class in COMPUTE or op.saved_bytes is None:
        return sum(i.nbytes for i in op.inputs)
    return op.saved_bytes


def _flops(op: LocalOp) -> float:
    return op.flops * (_SKIPPED_BY_CAUSAL if op.causal else 1.0)


def _gemms(op: LocalOp) -> tuple[Gemm, ...]:
    if op.op_class not in (OpClass.MATMUL, OpClass.CONVOLUTION):
        return ()
    return forward_gemms(op.target, [i.shape for i in op.inputs], op.flops)


def _keys(op: LocalOp) -> int:
    """Of attention."""
    return op.inputs[1].shape[-2] if len(op.inputs) > 1 and len(op.inputs[1].shape) > 1 else 0


def _window(op: LocalOp) -> int:
    """Positions of a convolution's window; 1 for other products."""
    convolves = op.op_class is OpClass.CONVOLUTION and len(op.inputs) > 1
    return prod(op.inputs[1].shape[2:]) or 1 if convolves else 1


def windows(shapes: Sequence[Shape], flops: float) -> tuple[bool, int, int]:
    """Of a convolution by the shapes of its operands: whether its window is 3 x 3 and visits every
    position, and how many values of images and of results tensor cores want with their channels
    innermost: none of a convolution of each channel by itself, which does not use them."""
    if len(shapes) < 2 or len(shapes[1]) < 3:
        return False, 0, 0
    image, weight = shapes[0], shapes[1]
    each = 2 * prod(weight) + (weight[0] if len(shapes) > 2 else 0)  # with a bias
    positions = round(flops / each) if each else 0
    small = weight[2:] == (3, 3) and positions == image[0] * prod(image[2:])
    if weight[1] == 1:
        return small, 0, 0
    return small, prod(image), positions * weight[0]


def _weight_gemms(op: LocalOp) -> tuple[Gemm, ...]:
    return tuple(g.for_weight() for g in _gemms(op))


def _work(op: LocalOp, flops: float, nbytes: float, gemms: tuple[Gemm, ...] = ()) -> KernelWork:
    depth = 0.0
    if op.op_class is OpClass.ATTENTION and len(op.inputs) > 1:
        depth = _keys(op) * (_SKIPPED_BY_CAUSAL if op.causal else 1.0)
    if op.op_class is not OpClass.CONVOLUTION:
        return KernelWork(op.op_class, op.dtype, flops, nbytes, gemms, depth)
    small, images, results = windows([i.shape for i in op.inputs], op.flops)
    images *= not any(i.channels_last for i in op.inputs)
    results *= not op.channels_last
    turned = (images + results) * DTYPE_BYTES[op.dtype]
    return KernelWork(op.op_class, op.dtype, flops, nbytes, gemms, depth, small, turned)
