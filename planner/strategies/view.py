"""Ops that only rearrange: a factor of the input is a factor of the output somewhere else."""

from collections.abc import Callable, Sequence

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.rules import (
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)


def rule(op: Op, graph: Graph) -> Rule | None:
    found = _RULES.get(name_of(op))
    if not found or not op.inputs:
        return None
    return found(op, graph)


def _permuted(op: Op, graph: Graph, order: Sequence[int]) -> Rule:
    dims = letters("d", len(order))
    return make_rule(op, graph, [dims], [tuple(dims[i] for i in order)], linear=[{0}])


def _permute(op: Op, graph: Graph) -> Rule:
    order = given(op, "dims")
    assert isinstance(order, tuple)
    return _permuted(op, graph, [int(str(i)) % len(order) for i in order])


def _swap(op: Op, graph: Graph) -> Rule:
    """transpose, swapaxes, t, mT: two dims change places."""
    rank = len(input_shapes(op, graph)[0])
    order = list(range(rank))
    if rank >= 2:
        first = dim_of(op, rank, "dim0", dim_of(op, rank, "axis0", -2))
        second = dim_of(op, rank, "dim1", dim_of(op, rank, "axis1", -1))
        order[first], order[second] = order[second], order[first]
    return _permuted(op, graph, order)


def _expand(op: Op, graph: Graph) -> Rule:
    """Dims of size 1 become a factor that only the output has."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    out = letters("d", len(target))
    own = out[len(out) - len(source) :]
    rest = [letters(f"r{i}_", len(s)) for i, s in enumerate(input_shapes(op, graph)[1:])]
    unread = [f for dims in rest for d in dims for f in d]
    return make_rule(op, graph, [own, *rest], [out], joined=unread, linear=[{0}])


def _broadcast(op: Op, graph: Graph) -> Rule:
    """Every input expanded to the shape of all."""
    dims = letters("d", len(output_shapes(op, graph)[0]))
    inputs = [dims[len(dims) - len(s) :] for s in input_shapes(op, graph)]
    outputs = [dims] * len(op.outputs)
    return make_rule(op, graph, inputs, outputs, linear=[set(range(len(inputs)))])


def _repeat(op: Op, graph: Graph) -> Rule:
    """A copy after the other: the size is the minor factor; the number of copies stays whole."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    lead = len(target) - len(source)
    padded = (1,) * lead + source
    copies = {f"c{i}": t // s for i, (s, t) in enumerate(zip(padded, target, strict=True))}
    sizes = copies | {f"d{i}": s for i, s in enumerate(padded)}
    out = tuple(
        (f"c{i}",) * (copies[f"c{i}"] > 1) + (f"d{i}",) * (s > 1) for i, s in enumerate(padded)
    )
    inside = letters("d", len(target))[lead:]
    return make_rule(op, graph, [inside], [out], sizes=sizes, whole=copies, linear=[{0}])


def _repeat_interleave(op: Op, graph: Graph) -> Rule | None:
    """Each element several times: the copies are the minor factor."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    if op.target != "aten.repeat_interleave.self_int" or given(op, "dim") is None:
        return None
    at = dim_of(op, len(source))
    dims = letters("d", len(source))
    sizes = {"c": target[at] // source[at], f"d{at}": source[at]}
    both = (f"d{at}",) * (source[at] > 1) + ("c",) * (sizes["c"] > 1)
    out = (*dims[:at], both, *dims[at + 1 :])
    return make_rule(op, graph, [dims], [out], sizes=sizes, whole=["c"], linear=[{0}])


def _same_but(op: Op, graph: Graph, dims: set[int]) -> Rule:
    """Input and outputs agree in all dims but these, which stay whole."""
    rank = len(input_shapes(op, graph)[0])
    inside = tuple((f"w{i}",) if i in dims else (f"d{i}",) for i in range(rank))
    outs = [
        tuple((f"o{k}_{i}",) if i in dims else (f"d{i}",) for i in range(rank))
        for k in range(len(op.outputs))
    ]
    whole = {f for side in (inside, *outs) for d in side for f in d if f[0] in "wo"}
    return make_rule(op, graph, [inside], outs, whole=whole, linear=[{0}])


def _slice(op: Op, graph: Graph) -> Rule:
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    return _same_but(op, graph, {i for i, n in enumerate(source) if n != target[i]})


def _select(op: Op, graph: Graph) -> Rule:
    rank = len(input_shapes(op, graph)[0])
    at = dim_of(op, rank)
    dims = letters("d", rank)
    outs = [(*dims[:at], *dims[at + 1 :])] * len(op.outputs)
    return make_rule(op, graph, [dims], outs, whole=dims[at], linear=[{0}])


def _split(op: Op, graph: Graph) -> Rule:
    """Equal parts are a major factor of their number; unequal ones keep the dim whole."""
    source = input_shapes(op, graph)[0]
    at = dim_of(op, len(source))
    parts = [shape[at] for shape in output_shapes(op, graph)]
    if len(set(parts)) > 1:
        return _same_but(op, graph, {at})
    dims = letters("d", len(source))
    inside = (
        *dims[:at],
        ("parts",) * (len(parts) > 1) + (f"d{at}",) * (parts[0] > 1),
        *dims[at + 1 :],
    )
    sizes = {"parts": len(parts), f"d{at}": parts[0]}
    outs = [dims] * len(parts)
    return make_rule(op, graph, [inside], outs, sizes=sizes, whole=["parts"], linear=[{0}])


def _cat(op: Op, graph: Graph) -> Rule | None:
    """The reverse of a split."""
    shapes = input_shapes(op, graph)
    target = output_shapes(op, graph)[0]
    if any(len(shape) != len(target) for shape in shapes):
        return None
    at = dim_of(op, len(target))
    parts = [shape[at] for shape in shapes]
    dims = letters("d", len(target))
    every = [set(range(len(shapes)))]
    if len(set(parts)) == 1:
        out = (
            *dims[:at],
            ("parts",) * (len(parts) > 1) + (f"d{at}",) * (parts[0] > 1),
            *dims[at + 1 :],
        )
        sizes = {"parts": len(parts), f"d{at}": parts[0]}
        inputs = [dims] * len(parts)
        return make_rule(op, graph, inputs, [out], sizes=sizes, whole=["parts"], linear=every)
    inputs = [(*dims[:at], (f"w{i}",), *dims[at + 1 :]) for i in range(len(parts))]
    whole = {f"d{at}", *(f"w{i}" for i in range(len(parts)))}
    return make_rule(op, graph, inputs, [dims], whole=whole, linear=every)


def _stack(op: Op, graph: Graph) -> Rule:
    target = output_shapes(op, graph)[0]
    at = dim_of(op, len(target))
    out = letters("d", len(target))
    inside = (*out[:at], *out[at + 1 :])
    inputs = [inside] * len(op.inputs)
    return make_rule(op, graph, inputs, [out], whole=out[at], linear=[set(range(len(inputs)))])


def _scatter_part(op: Op, graph: Graph) -> Rule:
    """slice_scatter, select_scatter: a part along one dim is replaced; the others agree."""
    target, part = input_shapes(op, graph)
    at = dim_of(op, len(target))
    dims = letters("d", len(target))
    inside = (*dims[:at], ("w",), *dims[at + 1 :]) if len(part) == len(target) else None
    if inside and part[at] == target[at]:
        inside = dims
    inputs = [dims, inside or (*dims[:at], *dims[at + 1 :])]
    return make_rule(op, graph, inputs, [dims], whole={"w", f"d{at}"}, linear=[{0, 1}])


def _pad(op: Op, graph: Graph) -> Rule:
    """Padding with zeros is linear; with anything else it is not."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    amounts = given(op, "pad", given(op, "padding"))
    assert isinstance(amounts, tuple)
    touched = {len(source) - 1 - i // 2 for i, n in enumerate(amounts) if n != 0}
    found = _same_but(op, graph, touched | {i for i, n in enumerate(source) if n != target[i]})
    zeros = not given(op, "value", 0) and given(op, "mode", "constant") == "constant"
    return found if zeros else make_rule(
        op, graph, found.inputs, found.outputs, whole=set(found.sizes) - found.split
    )  # fmt: skip


def _moved(op: Op, graph: Graph) -> Rule | None:
    """roll, flip, tril, triu: the dims they work along stay whole."""
    rank = len(input_shapes(op, graph)[0])
    dims = given(op, "dims", (-2, -1))
    if not isinstance(dims, tuple) or not dims:
        return None
    touched = {int(str(d)) % rank for d in dims}
    return _same_but(op, graph, touched)


def _pairs(op: Op, graph: Graph) -> Rule:
    """view_as_complex and view_as_real: the pair of reals is one more dim at the end."""
    ranks = [len(s) for s in (*input_shapes(op, graph), *output_shapes(op, graph))]
    dims = letters("d", max(ranks))
    return make_rule(
        op, graph, [dims[: ranks[0]]], [dims[: ranks[1]]], whole=dims[-1], linear=[{0}]
    )


def dim_of(op: Op, rank: int, argument: str = "dim", default: int = 0) -> int:
    """A dim argument, counted from the front."""
    dim = given(op, argument, default)
    assert isinstance(dim, int)
    return dim % max(rank, 1)


_RULES: dict[str, Callable[[Op, Graph], Rule | None]] = {
    "permute": _permute,
    **dict.fromkeys("transpose swapaxes swapdims t numpy_T mT".split(), _swap),
    **dict.fromkeys("expand expand_as expand_copy broadcast_to".split(), _expand),
    "broadcast_tensors": _broadcast,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "slice": _slice,
    "narrow": _slice,
    "select": _select,
    "unbind": _select,
    **dict.fromkeys(
        "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk "
        "unsafe_split_with_sizes".split(),
        _split,
    ),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
    "slice_scatter": _scatter_part,
    "select_scatter": _scatter_part,
    "pad": _pad,
    "constant_pad_nd": _pad,
    **dict.fromkeys(("roll", "flip", "tril", "triu"), _moved),
    "view_as_complex": _pairs,
    "view_as_real": _pairs,
}
