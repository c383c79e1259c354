"""Parameters of which a batch reads some rows only: the weights of embeddings."""

from dataclasses import dataclass
from math import prod

from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Kind

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


def tables_of(graph: Graph) -> tuple[EmbeddingTable, ...]:
    """Returns the trained parameters that ops read as tables and as nothing else, the largest
    first: the gradient of one that an output layer shares is dense."""
    lookups: dict[str, int] = {}
    others: set[str] = set()
    for op in graph.ops:
        weight = op.inputs[0] if op.inputs and op.target.startswith(_LOOKUPS) else ""
        if weight:
            ids = graph.tensors[op.inputs[1]]
            lookups[weight] = lookups.get(weight, 0) + prod(ids.shape)
        others |= {name for name in op.inputs if name != weight}
    found = []
    for name, count in lookups.items():
        tensor = graph.tensors[name]
        if name not in others and tensor.kind is Kind.PARAMETER and tensor.requires_grad:
            row_bytes = prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype]
            found.append(EmbeddingTable(tensor.fqn, tensor.shape[0], row_bytes, count))
    return tuple(sorted(found, key=lambda table: (-table.rows * table.row_bytes, table.path)))
