"""Parameters of which a batch reads some rows only: the weights of embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from meshwright.ir.graph.bags import is_cut, looks_up_given
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Kind, Op
from meshwright.ir.graph.rules import dim_of, given, name_of

LOOKUPS = ("aten.embedding.", "aten.embedding_bag.", "aten._embedding_bag.")
"""How targets of ops begin that read some rows of their first input, named by their second."""


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """One of them."""

    path: str
    """Of its module's weight."""
    rows: int
    row_bytes: int
    lookups: int
    """Rows that a global batch names, repeats counted."""
    ids: str
    """The model's input all of whose values are the rows that are read, or more than those; empty
    if there is none."""


def tables_of(graph: Graph) -> tuple[EmbeddingTable, ...]:
    """Returns the trained parameters that ops read as tables and as nothing else, the largest
    first: the gradient of one that an output layer shares is dense."""
    made = {name: op for op in graph.ops for name in op.outputs}
    lookups: dict[str, int] = {}
    sources: dict[str, set[str]] = {}
    others: set[str] = set()
    for op in graph.ops:
        weight = op.inputs[0] if op.inputs and op.target.startswith(LOOKUPS) else ""
        if weight:
            ids = graph.tensors[op.inputs[1]]
            lookups[weight] = lookups.get(weight, 0) + prod(ids.shape)
            sources.setdefault(weight, set()).add(_source(graph, made, op))
        others |= {name for name in op.inputs if name != weight}
    found = []
    for name, count in lookups.items():
        tensor = graph.tensors[name]
        if name not in others and tensor.kind is Kind.PARAMETER and tensor.requires_grad:
            row_bytes = prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype]
            source, *more = sorted(sources[name])
            found.append(EmbeddingTable(
                tensor.fqn, tensor.shape[0], row_bytes, count, "" if more else source
            ))  # fmt: skip
    return tuple(sorted(found, key=lambda table: (-table.rows * table.row_bytes, table.path)))


_SAME = frozenset({"clone", "_to_copy", "contiguous", "alias", "detach"})


def _source(graph: Graph, made: Mapping[str, Op], op: Op) -> str:
    """The input of the model that has all values of a look-up's ids, of the same samples; empty if
    there is none. One that is no batch is whole on every rank."""
    chain, name = [], op.inputs[1]
    while name in made:
        chain.append(made[name])
        name = chain[-1].inputs[0] if chain[-1].inputs else ""
    known = dict(zip(graph.inputs, graph.input_names, strict=True))
    if name not in known:
        return ""
    if name not in graph.batch_inputs:
        kept = all(each.target.split(".")[1] in _SAME | _MOVING for each in chain)
        return known[name] if kept else ""
    at: int | None = 0
    for each in reversed(chain):
        at = None if at is None else _samples_after(graph, each, at)
    if at is None:
        return ""
    torn = looks_up_given(op, graph) and not is_cut(op, graph)
    by_frequency = name_of(op) == "embedding_bag" and given(op, "scale_grad_by_freq")
    return "" if torn or by_frequency else known[name]


_MOVING = frozenset({
    "view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "transpose",
    "permute", "t", "slice", "select",
})  # fmt: skip
"""Ops whose values are all among those of their first input, at other places."""


def _samples_after(graph: Graph, op: Op, at: int) -> int | None:
    """The dim of an op's result along which samples lie, if they lie along `at` in its input; None
    if a rank's samples of the one are not made of its samples of the other, or nobody knows."""
    name, before = op.target.split(".")[1], graph.tensors[op.inputs[0]].shape
    after = graph.tensors[op.outputs[0]].shape
    if name in _SAME:
        return at
    if name in ("view", "_unsafe_view", "reshape", "flatten"):
        return 0 if at == 0 and after and after[0] % graph.batch_size == 0 else None
    rank = len(before)
    if name == "expand":
        return at + len(after) - rank
    if name == "unsqueeze":
        return at + (dim_of(op, rank + 1) <= at)
    if name in ("slice", "select"):
        dim = dim_of(op, rank)
        return None if dim == at else at - (name == "select" and dim < at)
    if name in ("transpose", "t"):
        first, second = (0, 1) if name == "t" else (dim_of(op, rank, "dim0"),
                                                    dim_of(op, rank, "dim1"))  # fmt: skip
        return {first: second, second: first}.get(at, at)
    if name == "permute":
        dims = given(op, "dims")
        assert isinstance(dims, tuple)
        return [int(str(dim)) % rank for dim in dims].index(at)
    return None
