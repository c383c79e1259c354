"""Parameters of which a batch reads some rows only: the weights of embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Kind, Op

_LOOKUPS = ("aten.embedding.", "aten.embedding_bag.", "aten._embedding_bag.")


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
        weight = op.inputs[0] if op.inputs and op.target.startswith(_LOOKUPS) else ""
        if weight:
            ids = graph.tensors[op.inputs[1]]
            lookups[weight] = lookups.get(weight, 0) + prod(ids.shape)
            sources.setdefault(weight, set()).add(_source(graph, made, op.inputs[1]))
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


_KEEPING = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "permute",
    "clone", "_to_copy", "contiguous", "slice", "select", "t", "flatten", "alias", "detach",
})  # fmt: skip
"""Ops whose values are all among those of their first input."""


def _source(graph: Graph, made: Mapping[str, Op], name: str) -> str:
    """The input of the model that has all values of a tensor; empty if there is none."""
    while name in made:
        op = made[name]
        if op.target.split(".")[1] not in _KEEPING:
            return ""
        name = op.inputs[0]
    return dict(zip(graph.inputs, graph.input_names, strict=True)).get(name, "")
