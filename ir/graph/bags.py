"""Bags of rows: where each begins is counted by the model, or given with the batch."""

from dataclasses import dataclass

from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.rules import given, input_shapes, name_of, slot

_LOOK_UP = "aten.embedding_bag."
_UNCHANGED = frozenset("unsqueeze squeeze view reshape contiguous to _to_copy clone".split())
_SAME = frozenset("to _to_copy clone contiguous detach alias".split())
_EACH_ALONE = _SAME | frozenset("remainder floor_divide add sub mul bitwise_and abs clamp".split())
"""Ops that make of each value one, whatever there is beside it, if they read one tensor."""


@dataclass(frozen=True, slots=True)
class GivenBags:
    """Where values of an input lie that belong to each sample."""

    offsets: str
    """The input with the first one of each sample."""
    last: bool
    """Whether that has one number more: where those of the last sample end."""


def has_given_bags(op: Op, graph: Graph) -> bool:
    """Tells whether the bags of an `embedding_bag` may be of any length: its offsets are not
    counted by the model, in equal steps, as they are of ids [samples, ids of each]."""
    ids, offsets = slot(op, "indices"), slot(op, "offsets")
    assert ids is not None and offsets is not None, op
    shapes = input_shapes(op, graph)
    count = shapes[ids][0]
    if given(op, "include_last_offset") or not shapes[offsets][0]:
        return True
    step, rest = divmod(count, shapes[offsets][0])
    name = op.inputs[offsets]
    return bool(rest) or not counts_from_zero(graph, name, shapes[offsets][0], step)


def looks_up_given(op: Op, graph: Graph) -> bool:
    """Tells whether an op looks bags up that may be of any length."""
    return op.target.startswith(_LOOK_UP) and has_given_bags(op, graph)


def is_cut(op: Op, graph: Graph) -> bool:
    """Tells whether a rank gets the bags of its samples alone, of an op that looks up given ones:
    as its ids and their weights belong to samples (`given_bags`)."""
    return any(op is look.op and _is_of_batch(look, graph) for look in _kept(graph))


def given_bags(graph: Graph, *, cut: bool = True) -> dict[str, GivenBags]:
    """Returns the inputs whose values are in bags that lie where another input says, and which
    nothing reads but such look-ups: ids and their weights, by the model's names for them.

    `cut`: only those that are cut by samples, in a graph that was traced with as many values for
    each sample.
    """
    names = dict(zip(graph.inputs, graph.input_names, strict=True))
    return {
        names[root]: GivenBags(names[look.offsets], look.last)
        for look in _kept(graph)
        if not cut or _is_of_batch(look, graph)
        for root in look.roots
    }


def _is_of_batch(look: "_Look", graph: Graph) -> bool:
    samples = graph.tensors[look.op.outputs[0]].shape[0] == graph.batch_size
    return samples and set(graph.batch_inputs).issuperset(look.roots)


@dataclass(frozen=True, slots=True)
class _Look:
    """A look-up of given bags."""

    op: Op
    roots: tuple[str, ...]
    """Inputs with its ids, and with their weights."""
    offsets: str
    last: bool
    values: frozenset[str]
    """What is made of the roots, they themselves, and what it reads."""
    places: frozenset[str]
    """The same of its offsets."""
    ops: frozenset[str]
    """It, and those that make all these."""


def _kept(graph: Graph) -> list[_Look]:
    """Look-ups of given bags whose inputs nothing else reads."""
    looks = [look for op in graph.ops if looks_up_given(op, graph) and (look := _look(op, graph))]
    while True:
        kept = [look for look in looks if _is_alone(look, looks, graph)]
        if len(kept) == len(looks):
            return kept
        looks = kept


def _look(op: Op, graph: Graph) -> _Look | None:
    """A look-up with what it reads; None if that is not made of inputs, each value by itself."""
    each = [slot(op, "indices"), slot(op, "per_sample_weights")]
    at = slot(op, "offsets")
    assert at is not None
    chains = [_chain(graph, op.inputs[i], _EACH_ALONE) for i in each if i is not None]
    places = _chain(graph, op.inputs[at], _SAME)
    bags = graph.tensors[op.outputs[0]].shape[0]
    last = bool(given(op, "include_last_offset"))
    known = [chain for chain in chains if chain]
    if not places or len(known) < len(chains) or given(op, "scale_grad_by_freq"):
        return None
    if graph.tensors[places[0][-1]].shape != (bags + last,):
        return None
    makers = {name for _, ops in (*known, places) for name in ops}
    values = {name for names, _ in known for name in names}
    return _Look(
        op, tuple(dict.fromkeys(names[-1] for names, _ in known)), places[0][-1], last,
        frozenset(values), frozenset(places[0]), frozenset({op.name, *makers}),
    )  # fmt: skip


def _chain(
    graph: Graph, name: str, through: frozenset[str]
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The values from one back to the input that it is made of, and the ops between; None if it
    is not made so."""
    names, ops = [name], []
    while op := graph.producer.get(names[-1]):
        if len(op.inputs) != 1 or name_of(op) not in through:
            return None
        names.append(op.inputs[0])
        ops.append(op.name)
    shapes = {graph.tensors[each].shape for each in names}
    is_input = graph.tensors[names[-1]].kind is Kind.INPUT
    return (tuple(names), tuple(ops)) if is_input and len(shapes) == 1 else None


def _is_alone(look: _Look, looks: list[_Look], graph: Graph) -> bool:
    """Whether all that reads what a look-up reads is such a look-up, with the same offsets."""
    ops = {name for each in looks for name in each.ops}
    same = all(
        (each.offsets, each.last) == (look.offsets, look.last)
        for each in looks if each.values & look.values
    )  # fmt: skip
    apart = not any(each.places & look.values or each.values & look.places for each in looks)
    read = [user.name for name in look.values | look.places for user in graph.users.get(name, ())]
    return same and apart and ops.issuperset(read)


def counts_from_zero(graph: Graph, name: str, size: int, step: int = 1) -> bool:
    """Whether a value is 0, `step`, 2 * `step`, … along its only dim, so that it splits with what
    it indexes."""
    tensor = graph.tensors[name]
    if tensor.numel != size or max(tensor.shape, default=1) != size:
        return False
    while op := graph.producer.get(name):
        if name_of(op) == "arange":
            return given(op, "start", 0) == 0 and given(op, "step", 1) == step
        shifted = name_of(op) == "add" and given(op, "other") == 0
        if name_of(op) not in _UNCHANGED and not shifted:
            return False
        name = op.inputs[0]
    return False
