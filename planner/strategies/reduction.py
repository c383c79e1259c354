"""Ops along some dims: sums and means give summands if those are split, others do not split."""

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)

SUMS = frozenset(["sum", "mean"])
REDUCING = frozenset(
    "amax amin argmax argmin max min var std var_mean std_mean any all prod logsumexp norm median "
    "linalg_vector_norm nansum count_nonzero".split()
)
KEEPING = frozenset(
    "softmax _softmax log_softmax _log_softmax _safe_softmax cumsum cumprod cummax logcumsumexp "
    "glu normalize sort topk argsort kthvalue".split()
)
NORMS = frozenset(["layer_norm", "rms_norm", "native_layer_norm"])


def rule(op: Op, graph: Graph) -> Rule | None:
    name = name_of(op)
    if name in SUMS | REDUCING:
        return _reduce(op, graph, name)
    if name in KEEPING:
        return _along(op, graph, name)
    if name in NORMS:
        return _norm(op, graph)
    return _group_norm(op, graph) if name == "group_norm" else None


def _reduced(op: Op, rank: int) -> set[int]:
    dims = given(op, "dim")
    if dims is None or dims == ():
        return set(range(rank))
    return {int(str(d)) % max(rank, 1) for d in (dims if isinstance(dims, tuple) else (dims,))}


def _reduce(op: Op, graph: Graph, name: str) -> Rule | None:
    shape, *others = input_shapes(op, graph)
    if others:
        return None
    dims = letters("d", len(shape))
    reduced = _reduced(op, len(shape))
    kept = tuple(d for i, d in enumerate(dims) if i not in reduced)
    same = tuple(d if i not in reduced else () for i, d in enumerate(dims))
    outs = [same if len(s) == len(shape) else kept for s in output_shapes(op, graph)]
    if name in SUMS:
        return make_rule(op, graph, [dims], outs, linear=[{0}])
    return make_rule(op, graph, [dims], outs, whole={f"d{i}" for i in reduced})


def _along(op: Op, graph: Graph, name: str) -> Rule:
    """Input and outputs agree in all dims but the one it works along."""
    shape = input_shapes(op, graph)[0]
    dim = given(op, "dim", -1)
    at = int(str(-1 if dim is None else dim)) % max(len(shape), 1)
    dims = letters("d", len(shape))
    outs: list[Dims] = []
    for k, out in enumerate(output_shapes(op, graph)):
        along = () if len(out) < len(shape) else ((f"o{k}",),)
        outs.append((*dims[:at], *along, *dims[at + 1 :]))
    whole = {f"d{at}", *(f"o{k}" for k in range(len(outs)))}
    linear = [{0}] if name in ("cumsum",) else []
    return make_rule(op, graph, [dims], outs, whole=whole, linear=linear)


def _norm(op: Op, graph: Graph) -> Rule:
    """x[..., n1, n2], weight and bias [n1, n2]: the leading dims may be split."""
    shape, *params = input_shapes(op, graph)
    size = given(op, "normalized_shape")
    assert isinstance(size, tuple)
    lead = len(shape) - len(size)
    dims = (*letters("d", lead), *letters("n", len(size)))
    outs: list[Dims] = [dims[: len(s)] for s in output_shapes(op, graph)]
    outs = [(*o[:lead], *(() for _ in o[lead:])) if k else o for k, o in enumerate(outs)]
    inputs = [dims, *(dims[lead:] for _ in params)]
    return make_rule(op, graph, inputs, outs, whole={f"n{i}" for i in range(len(size))})


def _group_norm(op: Op, graph: Graph) -> Rule:
    """x[N, C, ...]: samples and whole groups of channels."""
    shape, *params = input_shapes(op, graph)
    groups = int(str(given(op, "num_groups")))
    channel = ("g",) * (groups > 1) + ("c",) * (shape[1] > groups)
    sizes = {"g": groups, "c": shape[1] // groups}
    x = (("n",), channel, *letters("d", len(shape) - 2))
    whole = {"c", *(f"d{i}" for i in range(len(shape) - 2))}
    return make_rule(op, graph, [x, *((channel,) for _ in params)], [x], sizes=sizes, whole=whole)
