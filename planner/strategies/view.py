"""Ops that only rearrange: a factor of the input is a factor of the output somewhere else.

Reshaping factorises both shapes together: (B, S, 768) -> (B, S, 12, 64) has factors B, S, 12, 64,
so that splitting the 12 heads is `S(2)` before and after.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import gcd, prod

from meshwright.ir.graph import Graph, Op
from meshwright.planner.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)

Shape = tuple[int, ...]

COPYING = frozenset(
    "repeat repeat_interleave cat concat concatenate stack slice_scatter select_scatter pad "
    "constant_pad_nd roll flip tril triu view_copy _reshape_copy expand_copy".split()
)
"""Those that move data; the others only look at it differently."""


def is_free(op: Op) -> bool:
    """Whether the op does nothing at run time."""
    return name_of(op) in _RULES and name_of(op) not in COPYING


def rule(op: Op, graph: Graph) -> Rule | None:
    found = _RULES.get(name_of(op))
    if not found or not op.inputs or op.target == "aten.view.dtype":
        return None
    return found(op, graph)


def joint_factors(
    source: Shape, target: Shape, prefix: str = "f"
) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Dims of both shapes in common factors, the factors' sizes, and those that do not match."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    sides: tuple[list[tuple[str, ...]], list[tuple[str, ...]]] = ([], [])
    for left, right in _groups(source, target):
        cuts = sorted({*_cuts(left), *_cuts(right)}, reverse=True)
        if all(a % b == 0 for a, b in pairwise(cuts)):
            bounds = list(pairwise(cuts))
            names = [f"{prefix}{len(sizes) + i}" for i in range(len(bounds))]
            sizes |= {n: a // b for n, (a, b) in zip(names, bounds, strict=True)}
            for side, dims in zip(sides, (left, right), strict=True):
                side.extend(_covered(dims, list(zip(names, bounds, strict=True))))
            continue
        common = gcd(left[0], right[0])
        shared = f"{prefix}{len(sizes)}"
        sizes[shared] = common
        for side, dims in zip(sides, (left, right), strict=True):
            rest = (dims[0] // common, *dims[1:])
            names = [f"{prefix}{len(sizes) + i}" for i in range(len(rest))]
            sizes |= dict(zip(names, rest, strict=True))
            whole |= set(names)
            side.extend([(shared, names[0]), *((n,) for n in names[1:])])
    return tuple(sides[0]), tuple(sides[1]), sizes, whole


def _groups(source: Shape, target: Shape) -> list[tuple[Shape, Shape]]:
    """The shortest runs of dims of both shapes that have the same product."""
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        start = (i, j)
        left = right = 1
        while True:
            if left <= right and i < len(source) and (left < right or (i, j) == start):
                left, i = left * source[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            else:
                left, i = left * source[i], i + 1
            if (
                left == right
                and (i, j) != start
                and (left > 1 or _rest_is_one(source, target, i, j))
            ):
                break
        while i < len(source) and source[i] == 1:
            i += 1
        while j < len(target) and target[j] == 1:
            j += 1
        groups.append((source[start[0] : i], target[start[1] : j]))
    return groups


def _rest_is_one(source: Shape, target: Shape, i: int, j: int) -> bool:
    return prod(source[i:]) == 1 and prod(target[j:]) == 1


def _cuts(dims: Shape) -> list[int]:
    """Products of the dims behind each place, from all of them down to 1."""
    return [prod(dims[i:]) for i in range(len(dims) + 1)]


def _covered(dims: Shape, factors: list[tuple[str, tuple[int, int]]]) -> list[tuple[str, ...]]:
    """The factors between the cuts of each dim."""
    ends = list(pairwise(_cuts(dims)))
    return [tuple(n for n, (a, b) in factors if a <= hi and b >= lo and a > b) for hi, lo in ends]


def _reshape(op: Op, graph: Graph) -> Rule:
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    left, right, sizes, whole = joint_factors(source, target)
    rest = [letters(f"r{i}_", len(s)) for i, s in enumerate(input_shapes(op, graph)[1:])]
    unread = [f for dims in rest for d in dims for f in d]
    return make_rule(
        op, graph, [left, *rest], [right], sizes=sizes, whole=whole, joined=unread, linear=[{0}]
    )


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
    **dict.fromkeys(
        "view _unsafe_view reshape _reshape_copy view_copy flatten unflatten unsqueeze squeeze "
        "ravel view_as reshape_as unsqueeze_ squeeze_".split(),
        _reshape,
    ),
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
