"""Reshaping factorises both shapes together.

(B, S, 768) -> (B, S, 12, 64) has factors B, S, 12 and 64, so that splitting the 12 heads is `S(2)`
before and after.
"""

from dataclasses import replace
from itertools import pairwise
from math import gcd, prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import NO_FLOPS, OpFacts, Shape, named
from meshwright.ir.graph.op_forms import sized_as, with_size
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import Dims, Rule, input_shapes, letters, make_rule, output_shapes


def _reshape(op: Op, graph: Graph) -> Rule:
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    left, right, sizes, whole = joint_factors(source, target)
    rest = [letters(f"r{i}_", len(s)) for i, s in enumerate(input_shapes(op, graph)[1:])]
    unread = [f for dims in rest for d in dims for f in d]
    return make_rule(
        op, graph, [left, *rest], [right], sizes=sizes, whole=whole, joined=unread, linear=[{0}]
    )


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


def _unflatten(site: OpSite, form: Form) -> Form:
    dim = int(str(form.arg("dim"))) % len(site.input(0).shape)
    behind = len(site.input(0).shape) - dim - 1
    shape = site.local_output()
    return form.having(sizes=shape[dim : len(shape) - behind])


def _squeeze(site: OpSite, form: Form) -> Form:
    """A dim that is 1 only locally must stay."""
    ones = zip(site.input(0).shape, site.local_input(0), strict=True)
    if all(whole == 1 or local != 1 for whole, local in ones):
        return form
    args: tuple[tuple[str, Value], ...] = (("self", In(0)), ("shape", site.local_output()))
    return replace(form, target="aten.reshape.default", args=args)


_OWN = OpFacts(rule=_reshape)
_VIEW = replace(_OWN, op_class=OpClass.VIEW)
_SIZED = with_size("size")
FACTS = {
    **named("view", replace(_VIEW, flops=NO_FLOPS, form=_SIZED)),
    "aten.view.dtype": replace(_VIEW, rule=None, flops=NO_FLOPS, form=_SIZED),
    **named("_unsafe_view", replace(_VIEW, form=_SIZED)),
    **named("_reshape_copy view_copy", replace(_OWN, form=_SIZED)),
    **named("reshape", replace(_VIEW, flops=NO_FLOPS, shares="if it can", form=with_size("shape"))),
    **named("flatten", replace(_VIEW, shares="if it can")),
    **named("unflatten", replace(_VIEW, form=_unflatten)),
    **named("unsqueeze", replace(_VIEW, flops=NO_FLOPS)),
    **named("squeeze", replace(_VIEW, flops=NO_FLOPS, form=_squeeze)),
    **named("view_as", replace(_VIEW, form=sized_as("aten.view.default", "size"))),
    **named(
        "reshape_as",
        replace(_VIEW, shares="if it can", form=sized_as("aten.reshape.default", "shape")),
    ),
    **named("squeeze_ unsqueeze_", replace(_OWN, flops=NO_FLOPS)),
    **named("ravel", _OWN),
}
