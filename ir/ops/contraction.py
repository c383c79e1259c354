"""Contractions over letters: einsum and what is one by another name, chains of products."""

from collections.abc import Sequence
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.rules import Rule, given, make_rule

_BATCH = "."
"""Dims of an ellipsis are this letter with their number, from the back."""
_Term = tuple[str, ...]


def _rule(op: Op, graph: Graph) -> Rule | None:
    """Letters are factors; an ellipsis or a repeated letter in one operand is not taken apart."""
    equation = str(given(op, "equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow or "." in equation or any(len(set(t)) != len(t) for t in (*terms, right)):
        return None
    inputs = [tuple((c,) for c in term) for term in terms]
    linear = [{i} for i in range(len(terms))]
    return make_rule(op, graph, inputs, [tuple((c,) for c in right)], linear=linear)


def _einsum_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Of one product after the other, in the order that torch takes: that of `path`, else from
    the left. What one operand alone has is summed before."""
    shapes = _shapes(args.get("tensors"), of)
    left, _, right = str(args.get("equation")).replace(" ", "").partition("->")
    terms = [_letters(t, len(s)) for t, s in zip(left.split(","), shapes, strict=True)]
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    made = set(_letters(right, len(out))) if "->" in str(args.get("equation")) else _once(terms)
    path = args.get("path")
    numbers = [v for v in path if isinstance(v, int)] if isinstance(path, tuple) else []
    steps = list(zip(numbers[::2], numbers[1::2], strict=True)) or [(0, 1)] * (len(terms) - 1)
    count, rest = 0, [set(term) for term in terms]
    for one, other in steps:
        pair = [rest[one], rest[other]]
        rest = [term for at, term in enumerate(rest) if at not in (one, other)]
        later = made.union(*rest)
        both = {c for term in pair for c in term if c in later or c in pair[0] & pair[1]}
        count += prod(sizes[c] for c in both) * (2 if both - later else 1)
        # torch takes what it made first where it goes from the left; a path counts it as the last.
        rest = [*rest, both & later] if numbers else [both & later, *rest]
    return count or max(map(prod, shapes), default=0)


def _letters(term: str, rank: int) -> _Term:
    """The letters of one operand, an ellipsis as numbered ones."""
    before, dots, after = term.partition("...")
    batch = rank - len(before) - len(after) if dots else 0
    return (*before, *(f"{_BATCH}{i}" for i in range(batch, 0, -1)), *after)


def _once(terms: Sequence[_Term]) -> set[str]:
    """What an equation without an arrow makes: letters that are there once, and the ellipsis."""
    every = [letter for term in terms for letter in term]
    return {c for c in every if every.count(c) == 1 or c.startswith(_BATCH)}


def _shapes(tensors: object, of: ShapeOf) -> list[Shape]:
    return [of(one) for one in tensors] if isinstance(tensors, tuple) else []


def _tensordot_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    dims, shape = args.get("dims_self"), of(args.get("self"))
    numbers = dims if isinstance(dims, tuple) else ()
    return 2 * prod(out) * prod(shape[d] for d in numbers if isinstance(d, int))


def _inner_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    shape = of(args.get("self"))
    return 2 * prod(out) * (shape[-1] if shape else 1)


def _bilinear_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Of the products of both inputs with the weight [out, left, right]; torch takes the left one
    first."""
    made, left, right = of(args.get("weight"))
    rows = prod(out) // max(made, 1)
    bias = prod(out) * bool(of(args.get("bias")))
    return 2 * rows * made * right * (left + 1) + bias


def _addbmm_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    batch, _, inner = of(args.get("batch1"))
    return 2 * prod(out) * batch * inner + prod(out)


def _chain_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Of the cheapest order, which torch takes, too."""
    shapes = _shapes(args.get("tensors", args.get("matrices")), of)
    if not shapes:
        return 0
    first = shapes[0] if len(shapes[0]) > 1 else (1, *shapes[0])
    sizes = [*first, *((*s, 1)[1] for s in shapes[1:])]
    best = {(i, i): 0 for i in range(len(shapes))}
    for length in range(1, len(shapes)):
        for i in range(len(shapes) - length):
            j = i + length
            best[i, j] = min(
                best[i, k] + best[k + 1, j] + 2 * sizes[i] * sizes[k + 1] * sizes[j + 1]
                for k in range(i, j)
            )
    return best[0, len(shapes) - 1]


_MATMUL = OpClass.MATMUL
FACTS = {
    **named("einsum", OpFacts(op_class=_MATMUL, rule=_rule, flops=_einsum_flops)),
    **named("tensordot", OpFacts(op_class=_MATMUL, flops=_tensordot_flops)),
    **named("inner", OpFacts(op_class=_MATMUL, flops=_inner_flops)),
    **named("bilinear", OpFacts(op_class=_MATMUL, flops=_bilinear_flops)),
    **named("addbmm", OpFacts(op_class=_MATMUL, flops=_addbmm_flops)),
    **named("chain_matmul linalg_multi_dot", OpFacts(op_class=_MATMUL, flops=_chain_flops)),
}
