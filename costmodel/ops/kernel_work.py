"""What the kernels of an op have to do, forward and backward, from its local shapes."""

from collections.abc import Sequence
from math import gcd, prod

from meshwright.costmodel.ops.dtypes import is_fused
from meshwright.costmodel.ops.formulas import NARROW, Gemm, KernelWork
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import COMPUTE, op_name
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES

Shape = tuple[int, ...]

_ATTENTION_BACKWARD = 2.5
"""Flash attention recomputes the scores: 5 matmuls against 2 (Dao 2023, section 3)."""
_SKIPPED_BY_CAUSAL = 0.5
_LEFT_OPERAND = {"addmm": 1, "baddbmm": 1, "addbmm": 1}
_PASS_ON = frozenset("add add_ clone contiguous cat concat stack sum lift_fresh_copy".split())
"""Their backward hands the gradient on, or views of it, without a kernel."""
_BY_LOGARITHMS = frozenset({"cross_entropy_sum", "cross_entropy_loss"})
"""They write the logarithms of all probabilities, and a gradient of those before the logits'."""
_ADDING = frozenset({"meshwright.add_rms_norm.default", "meshwright.add_layer_norm.default"})


def forward_gemms(target: str, shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """The matrix products of an op from its operands' local shapes; empty if unknown."""
    name = op_name(target)
    if name == "experts":
        return _expert_gemms(shapes, flops)
    if name in ("conv1d", "conv2d", "conv3d", "convolution", "_convolution"):
        return _convolution_gemms(shapes, flops)
    first = _LEFT_OPERAND.get(name, 0)
    if len(shapes) < first + 2:
        return ()
    left, right = shapes[first], shapes[first + 1]
    if name == "linear":
        right = right[::-1]
    elif name not in ("mm", "addmm", "bmm", "baddbmm", "matmul"):
        return ()
    if len(left) < 2 or len(right) < 2 or not prod(left) * prod(right):
        return ()
    k, n = left[-1], right[-1]
    if len(right) == 2:
        return (Gemm(1, prod(left[:-1]), n, k, gcd(n, k)),)
    batch = max(prod(left[:-2]), prod(right[:-2]))
    return (Gemm(batch, left[-2], n, k, gcd(n, k)),)


def _expert_gemms(shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """Gate and up in one product, then down, for each expert of this rank."""
    whole = [shape for shape in shapes if len(shape) == 3]
    if len(whole) != 2:
        return ()
    (count, double, hidden), inner = whole[0], whole[0][1] // 2
    per_row = 2 * hidden * (double + inner)
    if not count * per_row:
        return ()
    rows = max(1, round(flops / per_row / count))
    row = gcd(hidden, inner)
    return Gemm(count, rows, double, hidden, row), Gemm(count, rows, hidden, inner, row)


def _convolution_gemms(shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """The implicit product: output positions x output channels over the window."""
    if len(shapes) < 2 or len(shapes[1]) < 3:
        return ()
    image, weight = shapes[0], shapes[1]
    k = prod(weight[1:])
    groups = max(1, image[1] // weight[1]) if weight[1] else 1
    n = weight[0] // groups
    if not n * k:
        return ()
    together = max(d for d in range(1, groups + 1) if groups % d == 0 and n * d <= max(n, NARROW))
    rows = max(1, round(flops / (2 * groups * n * k)))
    return (Gemm(groups, rows, n, k, packed=(1, together, together)),)


def forward_work(op: LocalOp) -> KernelWork:
    """All of the forward."""
    read = sum(i.nbytes for i in op.inputs)
    if op.op_class is OpClass.GATHER:
        # Only the rows that are asked for are read.
        read = op.output_bytes + sum(i.nbytes for i in op.inputs if not i.is_param)
    return _work(op, _flops(op), read + op.output_bytes + _logarithms(op), _gemms(op))


def input_work(op: LocalOp) -> KernelWork | None:
    """The gradients of the activations; None if there are none, or they cost no kernel."""
    wanted = _wanted(op, params=False)
    if not wanted or _passes_on(op, wanted):
        return None
    # What is added has one gradient, which both get.
    grads = (max if op.target in _ADDING else sum)(i.nbytes for i in wanted)
    if op.op_class is OpClass.GATHER:
        return _work(op, 0.0, 2 * op.output_bytes + grads)
    flops = _flops(op)
    if op.op_class is OpClass.ATTENTION:
        flops *= _ATTENTION_BACKWARD
    elif not any(i.is_param for i in op.inputs):
        flops *= sum(len(i.shape) > 1 for i in wanted)
    window = _window(op)
    gemms = tuple(g.for_input(window) for g in _gemms(op))
    if op.op_class is OpClass.MATMUL and len(_matrices(wanted)) > 1:
        gemms += _weight_gemms(op)
    passed = 2 * _logarithms(op)  # their gradient, written and read
    return _work(op, flops, op.output_bytes + _saved(op) + grads + passed, gemms)


def weight_work(op: LocalOp) -> KernelWork | None:
    """The gradients of the parameters."""
    wanted = _wanted(op, params=True)
    if not wanted:
        return None
    read = op.output_bytes + sum(i.nbytes for i in op.inputs if not i.is_param)
    if is_fused(op.target):
        read = 0  # in the same pass as the gradients of the activations
    products = bool(_matrices(wanted)) and op.op_class in COMPUTE
    gemms = _weight_gemms(op) if products else ()
    flops = op.flops if products else 0.0
    return _work(op, flops, read + sum(i.nbytes for i in wanted), gemms)


def accumulate_bytes(op: LocalOp) -> int:
    """Moved to add the parameters' gradients to those of earlier micro-batches."""
    return sum(
        3 * (i.cast_bytes - i.nbytes if i.cast_bytes else i.nbytes)
        for i in _wanted(op, params=True)
    )


def wanted_inputs(op: LocalOp) -> int:
    """How many activations get a gradient from a kernel."""
    wanted = _wanted(op, params=False)
    if is_fused(op.target):
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
    if op_name(op.target) not in _PASS_ON or not op.outputs:
        return False
    # A smaller operand was broadcast: its gradient is a sum.
    add = op_name(op.target) in ("add", "add_")
    return not add or all(prod(i.shape) == prod(op.outputs[0]) for i in wanted)


def _matrices(inputs: Sequence[LocalInput]) -> list[LocalInput]:
    return [i for i in inputs if len(i.shape) > 1]


def _logarithms(op: LocalOp) -> int:
    """Bytes of a loss's table of logarithms, as large as its logits."""
    return op.inputs[0].nbytes if op_name(op.target) in _BY_LOGARITHMS else 0


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
        keys = op.inputs[1].shape[-2] if len(op.inputs[1].shape) > 1 else 0
        depth = keys * (_SKIPPED_BY_CAUSAL if op.causal else 1.0)
    if op.op_class is not OpClass.CONVOLUTION:
        return KernelWork(op.op_class, op.dtype, flops, nbytes, gemms, depth)
    small, images, results = windows([i.shape for i in op.inputs], op.flops)
    images *= not any(i.channels_last for i in op.inputs)
    results *= not op.channels_last
    turned = (images + results) * DTYPE_BYTES[op.dtype]
    return KernelWork(op.op_class, op.dtype, flops, nbytes, gemms, depth, small, turned)
