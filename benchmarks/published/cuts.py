"""How each stack cuts a model's layers into stages of a pipeline."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import ceil

from benchmarks.published.measured import RowError
from benchmarks.published.rows import Row
from meshwright.ir.layout.layout import balanced

Cut = Callable[[Row, int], list[int]]
"""Of a row and a number of stages, how many layers each has."""


def equal(row: Row, count: int) -> list[int]:
    """As many layers on each; with fewer layers than stages embedding and loss have their own, and
    as the row says they count for a layer each."""
    if row.shape.layers + 2 < count:
        raise RowError(
            f"{row.shape.layers} layers, the embedding and the loss cannot fill {count} stages; "
            f"nearest is {row.shape.layers + 2}"
        )
    if row.parallel.ends_are_layers or row.shape.layers < count:
        ends = [0, *(end - 1 for end in accumulate(balanced(row.shape.layers + 2, count)))]
        ends[-1] = row.shape.layers
        return [b - a for a, b in pairwise(ends)]
    return list(balanced(row.shape.layers, count))


def full(row: Row, count: int) -> list[int]:
    """As many layers on every stage but the last, which gets the rest."""
    size = ceil(row.shape.layers / count)
    ends = [min(row.shape.layers, size * i) for i in range(count + 1)]
    return [b - a for a, b in pairwise(ends)]


def by_cost(row: Row, count: int) -> list[int]:
    """nanotron (models/base.py): blocks go to a stage until their cumulative cost passes its share
    (or reaches it, as the static memory of the sweep's runs shows); layers and the head count,
    embedding, norms and loss do not."""
    shape = row.shape
    each = 4 * shape.heads * shape.head_dim * shape.hidden + 3 * shape.ffn * shape.hidden
    total = each * shape.layers + shape.vocab * shape.hidden
    placed, stage, cumulative = [], 0, 0
    for _ in range(shape.layers):
        placed.append(min(stage, count - 1))
        cumulative += each
        if cumulative >= total * (stage + 1) / count:
            stage += 1
    return [placed.count(i) for i in range(count)]


def starts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the blocks that begin stages 1, 2, ..., of a model whose first block is its
    embedding and whose last one is its head; RowError where a stage would have no block."""
    begin = tuple(1 + end for end in accumulate(sizes))[:-1]
    if any(a == b for a, b in pairwise(begin)):
        raise RowError("a stage in the middle has no layer")
    return begin
