"""The whole communication story: how a value changes placement on one axis, and its gradient back.

A value placed A is needed placed B. Forward runs `primitive(A, B)`; backward takes the gradient
from dual(B) to dual(A) by the same table. The dual of S is S, of P and of R it is R, of R|P it is
P. The cost model prices these primitives, codegen emits them, tests prove them.
"""

from dataclasses import dataclass
from enum import StrEnum

from meshwright.ir.layout.layout import P, Partial, Placement, R, Replicate, Shard


class Primitive(StrEnum):
    """What moves one value from one placement to another on one axis."""

    IDENTITY = "identity"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SLICE = "slice"
    """Replicate to Shard: each rank keeps its part; no communication."""
    MASK = "mask"
    """Replicate to Partial: the rank at coordinate 0 keeps the value, the others hold zeros."""
    PAD = "pad"
    """Shard to Partial: each rank's part in zeros of the full shape; no communication."""


COMMUNICATES = frozenset(
    {Primitive.ALL_REDUCE, Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL}
)


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value placed so."""
    match placement:
        case Shard():
            return placement
        case Partial():
            return R
        case Replicate(partial_grad):
            return P if partial_grad else R


def primitive(source: Placement, target: Placement) -> Primitive:
    """What takes a value from `source` to `target`, whether or not gradients are partial."""
    match source, target:
        case (Replicate(), Replicate()) | (Partial(), Partial()):
            return Primitive.IDENTITY
        case Shard(), Shard():
            return Primitive.IDENTITY if source == target else Primitive.ALL_TO_ALL
        case Partial(), Replicate():
            return Primitive.ALL_REDUCE
        case Partial(), Shard():
            return Primitive.REDUCE_SCATTER
        case Shard(), Replicate():
            return Primitive.ALL_GATHER
        case Shard(), Partial():
            return Primitive.PAD
        case Replicate(), Shard():
            return Primitive.SLICE
        case Replicate(), Partial():
            return Primitive.MASK
    raise AssertionError((source, target))


@dataclass(frozen=True, slots=True)
class Conversion:
    """One placement change on one axis, both ways."""

    source: Placement
    target: Placement

    @property
    def forward(self) -> Primitive:
        return primitive(self.source, self.target)

    @property
    def backward(self) -> Primitive:
        return primitive(dual(self.target), dual(self.source))
