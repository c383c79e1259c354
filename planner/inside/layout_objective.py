"""For what a layout is made: prices, how many samples a rank has, what memory is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Kind, Op
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.inside.prices import AlphaBeta, Prices

MICROBATCHES = 8
"""How many micro-batches a step is assumed to have: each converts the parameters again, while
storing them counts once."""

Shape = tuple[int, ...]


class OpSeconds(Protocol):
    """Seconds of an op, forward and backward."""

    def __call__(
        self, op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape], share: float
    ) -> float:
        """At the shapes of one rank, which does that share of the op for its samples."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Prices per axis and what they are for."""

    prices: tuple[Prices, ...]
    """Per axis of the mesh; ops cost what the first says, unless there is a timer."""
    samples: int = 1
    """Of one micro-batch on a rank. With one, layouts do not depend on how the batch is cut."""
    parameter_uses: float = MICROBATCHES
    """How often a conversion of a parameter counts."""
    once: float = 1.0
    """How often what happens once per step counts."""
    stored_s_per_byte: float | None = None
    """What a stored parameter byte costs; by default what the prices say."""
    saved_s_per_byte: float = 0.0
    """What a byte of an activation costs that is kept for backward."""
    timer: OpSeconds | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Of values at run time, where they are others than the graph's."""

    def nbytes(self, graph: Graph, name: str) -> int:
        """Bytes of a value for the samples of a rank; what is stored is needed whole."""
        tensor = graph.tensors[name]
        whole = tensor.numel * DTYPE_BYTES[self.dtypes.get(name, tensor.dtype)]
        stored = tensor.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
        return whole if stored else -(-whole // graph.batch_size) * self.samples

    def stored_s(self, nbytes: int) -> float:
        """What storing parameters costs."""
        if self.stored_s_per_byte is None:
            return self.prices[0].stored_s(nbytes)
        return nbytes * self.stored_s_per_byte


def usual(mesh: ModelMesh, prices: Prices | None = None) -> Regime:
    """By default prices at which splitting pays even for small models."""
    return Regime((prices or AlphaBeta(),) * len(mesh))
