"""Dtypes of values at run time under a precision, and which values share memory."""

from collections.abc import Mapping

from meshwright.ir.cluster.device import COMPUTE, OpClass
from meshwright.ir.graph.autocast import Cast, cast_of
from meshwright.ir.graph.graph import Graph, Kind, Op, Tensor
from meshwright.ir.graph.rules import slots
from meshwright.ir.ops import facts
from meshwright.ir.precision import Precision

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def is_float(dtype: str) -> bool:
    return dtype in _FLOATS


def runtime_dtypes(graph: Graph, precision: Precision, kind: str) -> dict[str, str]:
    """Name -> dtype that the value has when the plan runs on devices of a kind.

    Under torch.autocast parameters stay float32, some operators get what they read in its dtype or
    in float32, and all give what promotion says. Else all are in those that they are traced in, but
    for a plan all in one type that no parameter has: then all are in that.
    """
    own = {x.dtype for x in graph.parameters}
    if (target := precision.all_in) and target not in own:
        return {n: target if is_float(t.dtype) else t.dtype for n, t in graph.tensors.items()}
    if not precision.autocast:
        return {name: tensor.dtype for name, tensor in graph.tensors.items()}
    dtypes = {name: _stored(tensor) for name, tensor in graph.tensors.items()}
    for op in graph.ops:
        cast = how_cast(op.target, kind)
        for out in filter(None, op.outputs):
            if is_float(graph.tensors[out].dtype):
                dtypes[out] = _made(op, graph, dtypes, cast, precision.autocast, out)
    return dtypes


def how_cast(target: str, kind: str) -> Cast | None:
    """What becomes of an operator's operands under autocast; None if they stay."""
    if target.startswith("aten."):
        return cast_of(target, kind)
    known = facts(target)
    if known.autocast == "inside":
        return None
    if facts(target).op_class in COMPUTE:
        return "narrow"
    if known.op_class is OpClass.NORMALIZATION and known.autocast == "by class":
        return "result" if known.fused else "float32"
    return None


def read_as(op: Op, name: str, dtypes: Mapping[str, str], narrow: str, kind: str) -> str:
    """The dtype in which an op gets a value under autocast."""
    return _brought(op, name, dtypes, how_cast(op.target, kind), narrow)


def _brought(op: Op, name: str, dtypes: Mapping[str, str], cast: Cast | None, narrow: str) -> str:
    own = dtypes[name]
    if own not in _FLOATS[:-1]:
        return own  # autocast leaves float64 alone
    match cast:
        case "narrow":
            return narrow
        case "products":
            return own if name in [op.inputs[i] for i in slots(op, "hx")] else narrow
        case "float32":
            return "float32"
        case "widest":
            return max((dtypes[n] for n in op.inputs if is_float(dtypes[n])), key=_FLOATS.index)
    return own


def _stored(tensor: Tensor) -> str:
    half = tensor.dtype in ("float16", "bfloat16")
    return "float32" if half and tensor.kind is Kind.PARAMETER else tensor.dtype


def _made(
    op: Op, graph: Graph, dtypes: Mapping[str, str], cast: Cast | None, narrow: str, out: str
) -> str:
    asked, known = dict(op.args).get("dtype"), facts(op.target).autocast
    if isinstance(asked, str) and is_float(asked):
        return asked
    if cast is None or known == "float32":
        match known:
            case "float32":
                return known
            case "first" | "inside":
                return dtypes[op.inputs[0]]
            case "traced":
                return graph.tensors[out].dtype
    read = [n for n in op.inputs if is_float(dtypes[n])]
    # A number does not widen an array.
    arrays = [n for n in read if graph.tensors[n].shape] or read
    brought = [_brought(op, n, dtypes, cast, narrow) for n in arrays]
    least = ["float32"] if cast == "result" else []
    return max([*brought, *least], key=_FLOATS.index, default=graph.tensors[out].dtype)


def _copies(op: Op, dtypes: Mapping[str, str]) -> bool:
    """Whether a cast makes a value of its own."""
    return bool(dict(op.args).get("copy")) or dtypes[op.inputs[0]] != dtypes[op.outputs[0]]


def storage_roots(graph: Graph, dtypes: Mapping[str, str]) -> dict[str, str]:
    """Name -> the value whose memory it looks into; itself if it has its own. `dtypes`: of all
    values, as they run."""
    roots: dict[str, str] = {}
    strided: set[str] = set()
    for op in graph.ops:
        how = facts(op.target).shares
        if not op.inputs or (how == "by class" and facts(op.target).op_class is not OpClass.VIEW):
            continue
        source = op.inputs[0]
        if how == "if it casts nothing" and _copies(op, dtypes):
            continue
        if how == "if it can" and source in strided:
            continue
        for out in filter(None, op.outputs):
            roots[out] = roots.get(source, source)
            if how == "strided" or source in strided:
                strided.add(out)
    return {name: roots.get(name, name) for name in graph.tensors}
