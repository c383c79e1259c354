"""What the layout solver asks of a cost model, and plain numbers for when there is none."""

from dataclasses import dataclass
from typing import Protocol

from meshwright.ir.conversions import COMMUNICATES, Primitive


class Prices(Protocol):
    """Seconds. Bytes and flops are those of the whole op or value, not of one rank's part."""

    def primitive_s(self, primitive: Primitive, nbytes: int, ranks: int) -> float:
        """One conversion primitive on a value of `nbytes` over `ranks`."""

    def op_s(self, flops: float, nbytes: float) -> float:
        """One op that does `flops` and moves `nbytes`."""

    def stored_s(self, nbytes: int) -> float:
        """What it is worth not to store `nbytes` of parameters."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """Latency and bandwidth per collective, roofline per op.

    The defaults are a machine on which splitting pays even for small models: only the ratios
    matter, as those of an accelerator in a fast node with the latency left out.
    """

    latency_s: float = 1e-8
    bandwidth: float = 100e9
    flops_per_s: float = 100e12
    memory_bandwidth: float = 1e12
    state_per_parameter_byte: float = 8.0
    """Bytes moved per step for each byte of parameters: gradient, optimizer state, update."""

    def primitive_s(self, primitive: Primitive, nbytes: int, ranks: int) -> float:
        if primitive is Primitive.IDENTITY:
            return 0.0
        if primitive not in COMMUNICATES:
            return nbytes / self.memory_bandwidth
        rounds = 2 if primitive is Primitive.ALL_REDUCE else 1
        moved = nbytes * (ranks - 1) / ranks
        if primitive is Primitive.ALL_TO_ALL:
            moved /= ranks
        return rounds * ((ranks - 1) * self.latency_s + moved / self.bandwidth)

    def op_s(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops_per_s, nbytes / self.memory_bandwidth)

    def stored_s(self, nbytes: int) -> float:
        return nbytes * self.state_per_parameter_byte / self.memory_bandwidth
