"""What an op rule says: which factors the dims of its tensors are made of, and which may be split.

A dim is a product of factors, major to minor; a factor that appears in several tensors of an op is
split in all of them together. A factor that is split but missing from an output makes that output
a sum over the ranks; an input without it has summands of its gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from meshwright.ir.graph.graph import Graph, Op, Ref

Dims = tuple[tuple[str, ...], ...]
"""Factors of each dim of one tensor; a dim of size 1 has none."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one op."""

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    """Per `Op.inputs`."""
    outputs: tuple[Dims, ...]
    """Per `Op.outputs`."""
    split: frozenset[str]
    """Factors that may be split on any axis."""
    batch: frozenset[str] = frozenset()
    """Factors that may be split on `dp` only, where the generated code adds what is missing."""
    joined: frozenset[str] = frozenset()
    """Factors over which the generated code communicates inside the op: outputs without such a
    factor are whole, not sums."""
    summed: frozenset[int] = frozenset()
    """Inputs without a joined factor whose gradient the generated code leaves as summands."""
    plain: frozenset[str] = frozenset()
    """Factors that are split only into runs of consecutive elements (no `outer`)."""
    added: frozenset[int] = frozenset()
    """Inputs that are added to a contraction: summands if the contraction gives summands."""
    linear: tuple[frozenset[int], ...] = ()
    """Sets of inputs in which the op is jointly linear: if they are summands, so is the result."""
    free: frozenset[int] = frozenset()
    """Inputs that the generated code takes whole and cuts itself where the others are split."""
    together: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A name for several factors that are split at once, on other axes than dp: the generated code
    brings their parts together inside the op. It does so on one axis, if they are not `nested`,
    and no other splits them."""
    loose: frozenset[str] = frozenset()
    """First factors of `together` that other axes may split all the same."""
    nested: frozenset[str] = frozenset()
    """Names in `together` whose parts are brought together on several axes, one in the other."""
    uneven: frozenset[str] = frozenset()
    """Names of `together` whose last parts are more work than their first ones; parts in zigzag are
    equally much."""


def name_of(op: Op) -> str:
    """`linear` for `aten.linear.default`; custom ops keep their namespace."""
    space, name, *_ = op.target.split(".")
    return name if space == "aten" else f"{space}.{name}"


def input_shapes(op: Op, graph: Graph) -> tuple[tuple[int, ...], ...]:
    return tuple(graph.tensors[name].shape for name in op.inputs)


def output_shapes(op: Op, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Shapes of the outputs; an output that is no tensor has shape ()."""
    return tuple(graph.tensors[name].shape if name else () for name in op.outputs)


def slots(op: Op, argument: str) -> tuple[int, ...]:
    """Which of `op.inputs` the argument holds; empty if it holds none or does not exist."""
    index = 0
    for name, arg in op.args:
        refs = _count(arg)
        if name == argument:
            return tuple(range(index, index + refs))
        index += refs
    return ()


def slot(op: Op, argument: str) -> int | None:
    """Which of `op.inputs` the argument is."""
    found = slots(op, argument)
    return found[0] if found else None


def given(op: Op, argument: str, default: object = None) -> object:
    """The argument's value, `default` where the schema has no such argument."""
    return dict(op.args).get(argument, default)


def dim_of(op: Op, rank: int, argument: str = "dim", default: int = 0) -> int:
    """A dim argument, counted from the front."""
    dim = given(op, argument, default)
    assert isinstance(dim, int)
    return dim % max(rank, 1)


def _count(arg: object) -> int:
    if isinstance(arg, Ref):
        return 1
    return sum(map(_count, arg)) if isinstance(arg, tuple) else 0


def letters(prefix: str, rank: int) -> Dims:
    """One factor of its own for each dim."""
    return tuple((f"{prefix}{i}",) for i in range(rank))


def aligned(dims: Dims, rank: int) -> Dims:
    """The last `rank` dims: what a tensor of that rank has after broadcasting to `dims`."""
    return dims[len(dims) - rank :]


def make_rule(
    op: Op,
    graph: Graph,
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    *,
    sizes: Mapping[str, int] | None = None,
    whole: Iterable[str] = (),
    batch: Iterable[str] = (),
    joined: Iterable[str] = (),
    plain: Iterable[str] = (),
    summed: Iterable[int] = (),
    added: Iterable[int] = (),
    linear: Iterable[Iterable[int]] = (),
    free: Iterable[int] = (),
    together: Mapping[str, tuple[str, ...]] | None = None,
    loose: Iterable[str] = (),
    nested: Iterable[str] = (),
    uneven: Iterable[str] = (),
) -> Rule:
    """The rule with dims of size 1 stripped of factors and sizes read from the shapes.

    `sizes` is needed only for factors that never are a dim of their own. All factors may be split
    but those in `whole` (never) and `batch` (on `dp`); those in `whole` may be in `together`.
    """
    every, known = _measured(op, graph, (*inputs, *outputs), sizes or {})
    kept = _names(every)
    groups = {name: f for name, f in (together or {}).items() if kept.issuperset(f)}
    return Rule(
        sizes={f: known[f] for f in kept} | {name: known[f[0]] for name, f in groups.items()},
        inputs=tuple(every[: len(inputs)]),
        outputs=tuple(every[len(inputs) :]),
        split=frozenset(kept - set(whole) - set(batch)) | groups.keys(),
        batch=frozenset(kept & set(batch)),
        joined=frozenset(joined),
        plain=frozenset(plain),
        summed=frozenset(summed),
        added=frozenset(added),
        linear=tuple(frozenset(group) for group in linear),
        free=frozenset(free),
        together=groups,
        loose=frozenset(loose),
        nested=frozenset(nested),
        uneven=frozenset(uneven) & groups.keys(),
    )


def _measured(
    op: Op, graph: Graph, given_dims: Sequence[Dims], sizes: Mapping[str, int]
) -> tuple[list[Dims], dict[str, int]]:
    """The dims without factors of size 1, and the sizes of all factors."""
    shapes = (*input_shapes(op, graph), *output_shapes(op, graph))
    known = dict(sizes)
    every: list[Dims] = []
    for shape, dims in zip(shapes, given_dims, strict=True):
        assert len(shape) == len(dims), (op.key, op.target, shape, dims)
        every.append(tuple(d if n != 1 else () for d, n in zip(dims, shape, strict=True)))
        known |= {d[0]: n for d, n in zip(dims, shape, strict=True) if len(d) == 1 and n != 1}
    for shape, dims in zip(shapes, every, strict=True):
        for size, factors in zip(shape, dims, strict=True):
            assert prod(known[f] for f in factors) == size, (op.key, op.target, shape, dims, known)
    return every, known


def _names(every: Iterable[Dims]) -> set[str]:
    return {f for dims in every for factors in dims for f in factors}


def along_last(sums: int) -> Callable[[Op, Graph], Rule]:
    """The rule of norms of x and `sums` - 1 residuals [..., n], with gain (and bias) [n] -> the
    sums, the norm among them, and statistics [...]; what is normalised along stays whole."""

    def rule(op: Op, graph: Graph) -> Rule:
        shapes = input_shapes(op, graph)
        dims = (*letters("d", len(shapes[0]) - 1), ("n",))
        inputs = [dims] * sums + [(("n",),)] * (len(shapes) - sums)
        statistics = [dims[:-1]] * (len(op.outputs) - sums)
        return make_rule(op, graph, inputs, [dims] * sums + statistics, whole="n")

    return rule
