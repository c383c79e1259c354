"""Dtypes of values at run time under a precision, and which values share memory."""

from meshwright.costmodel.ops.op_classes import COMPUTE, classify
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Kind, Op, Tensor
from meshwright.ir.ops import facts
from meshwright.ir.precision import Precision

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_norm(target: str) -> bool:
    """Whether it is a norm or a loss that autocast computes in float32."""
    known = facts(target)
    return known.op_class is OpClass.NORMALIZATION and known.autocast == "by class"


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def runtime_dtypes(graph: Graph, precision: Precision) -> dict[str, str]:
    """Name -> dtype that the value has when the plan runs.

    Under torch.autocast parameters stay float32, matmul-like ops give its dtype, norms (but
    batch-norm) and losses float32, all others what promotion says. Else all are in one type, or in
    those that they are traced in.
    """
    if target := precision.all_in:
        return {n: target if is_float(t.dtype) else t.dtype for n, t in graph.tensors.items()}
    if not precision.autocast:
        return {name: tensor.dtype for name, tensor in graph.tensors.items()}
    dtypes = {name: _stored(tensor) for name, tensor in graph.tensors.items()}
    for op in graph.ops:
        for out in filter(None, op.outputs):
            if is_float(graph.tensors[out].dtype):
                traced = graph.tensors[out].dtype
                dtypes[out] = _autocast(op, dtypes, traced, precision.autocast)
    return dtypes


def _stored(tensor: Tensor) -> str:
    half = tensor.dtype in ("float16", "bfloat16")
    return "float32" if half and tensor.kind is Kind.PARAMETER else tensor.dtype


def _autocast(op: Op, dtypes: dict[str, str], traced: str, cast: str) -> str:
    match facts(op.target).autocast:
        case "float32" | "bfloat16" as fixed:
            return fixed
        case "first":
            return dtypes[op.inputs[0]]
        case "traced":
            return traced
        case "by class" if classify(op.target) in COMPUTE:
            return cast
        case "by class" if is_norm(op.target):
            return "float32"
    return _promoted(op, dtypes, traced)


def _promoted(op: Op, dtypes: dict[str, str], traced: str) -> str:
    inputs = [dtypes[name] for name in op.inputs if is_float(dtypes[name])]
    return max(inputs, key=_FLOATS.index, default=traced)


def storage_roots(graph: Graph) -> dict[str, str]:
    """Name -> the value whose memory it looks into; itself if it has its own."""
    roots: dict[str, str] = {}
    strided: set[str] = set()
    for op in graph.ops:
        how = facts(op.target).shares
        if not op.inputs or (how == "by class" and classify(op.target) is not OpClass.VIEW):
            continue
        source = op.inputs[0]
        if how == "if it can" and source in strided:
            continue
        for out in filter(None, op.outputs):
            roots[out] = roots.get(source, source)
            if how == "strided" or source in strided:
                strided.add(out)
    return {name: roots.get(name, name) for name in graph.tensors}
