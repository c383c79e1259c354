"""Dtypes of values at run time under a precision, and which values share memory."""

from meshwright.costmodel.ops.op_classes import COMPUTE, classify, op_name
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Kind, Op, Tensor
from meshwright.ir.ops import facts

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_AUTOCAST_FLOAT32 = frozenset(
    "pow rsqrt exp log prod cumsum norm sum mse_loss l1_loss "
    "binary_cross_entropy_with_logits".split()
)
NORMS_AS_GIVEN = frozenset("batch_norm cudnn_batch_norm native_batch_norm instance_norm".split())
"""Norms that autocast leaves alone: values stay as they come, weights and statistics float32."""
_STRIDED = frozenset(
    "transpose permute t expand swapaxes movedim mT expand_as broadcast_to select slice split "
    "chunk unbind unfold diagonal".split()
)
_MAY_COPY = frozenset({"reshape", "flatten", "contiguous", "reshape_as"})


def is_fused(target: str) -> bool:
    """Whether it is an operator of a fused kernel, which takes what it is given: autocast does not
    know it."""
    known = facts(target)
    return known is not None and known.fused


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def runtime_dtypes(graph: Graph, precision: str) -> dict[str, str]:
    """Name -> dtype that the value has when the plan runs.

    fp64 and fp32 run everything in that type. bf16 is torch.autocast: parameters stay float32,
    matmul-like ops give bfloat16, norms (but batch-norm) and losses float32, all others what
    promotion says.
    """
    if precision != "bf16":
        target = {"fp64": "float64", "fp32": "float32"}[precision]
        return {n: target if is_float(t.dtype) else t.dtype for n, t in graph.tensors.items()}
    dtypes = {name: _stored(tensor) for name, tensor in graph.tensors.items()}
    for op in graph.ops:
        for out in filter(None, op.outputs):
            if is_float(graph.tensors[out].dtype):
                dtypes[out] = _autocast(op, dtypes, graph.tensors[out].dtype)
    return dtypes


def _stored(tensor: Tensor) -> str:
    half = tensor.dtype in ("float16", "bfloat16")
    return "float32" if half and tensor.kind is Kind.PARAMETER else tensor.dtype


def _autocast(op: Op, dtypes: dict[str, str], traced: str) -> str:
    op_class, known = classify(op.target), facts(op.target)
    kind = known.autocast if known else "by class"
    if kind in ("float32", "bfloat16"):
        return kind
    if kind == "first" or op_name(op.target) in NORMS_AS_GIVEN:
        return dtypes[op.inputs[0]]
    if kind == "by class" and op_class in COMPUTE:
        return "bfloat16"
    if kind == "promoted":
        return _promoted(op, dtypes, traced)
    if op_class is OpClass.NORMALIZATION or op_name(op.target) in _AUTOCAST_FLOAT32:
        return "float32"
    if op_name(op.target) in ("to", "_to_copy"):
        return traced
    return _promoted(op, dtypes, traced)


def _promoted(op: Op, dtypes: dict[str, str], traced: str) -> str:
    inputs = [dtypes[name] for name in op.inputs if is_float(dtypes[name])]
    return max(inputs, key=_FLOATS.index, default=traced)


def storage_roots(graph: Graph) -> dict[str, str]:
    """Name -> the value whose memory it looks into; itself if it has its own."""
    roots: dict[str, str] = {}
    strided: set[str] = set()
    for op in graph.ops:
        name = op_name(op.target)
        view = classify(op.target) is OpClass.VIEW or name in _MAY_COPY
        for out in filter(None, op.outputs):
            source = op.inputs[0] if op.inputs else ""
            if not view or not source or (name in _MAY_COPY and source in strided):
                continue
            roots[out] = roots.get(source, source)
            if name in _STRIDED or (source in strided and name not in _MAY_COPY):
                strided.add(out)
    return {name: roots.get(name, name) for name in graph.tensors}
