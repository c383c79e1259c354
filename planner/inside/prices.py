"""What the layout solver asks of a cost model, and plain numbers for when there is none."""

from dataclasses import dataclass
from typing import Protocol

from meshwright.ir.layout.conversions import COMMUNICATES, Primitive


class Prices(Protocol):
    """Seconds. Bytes and flops are those of the whole op or value, not of one rank's part."""

    @property
    def hides(self) -> bool:
        """Whether a message travels beside computing, and slows none of it."""

    def primitive_s(self, primitive: Primitive, nbytes: int, ranks: int) -> float:
        """One conversion primitive on a value of `nbytes` over `ranks`."""

    def op_s(self, flops: float, nbytes: float) -> float:
        """One op that does `flops` and moves `nbytes`."""

    def packed_s(self, nbytes: float) -> float:
        """Reading and writing so many bytes for messages inside of ops."""

    def stored_s(self, nbytes: int) -> float:
        """What it is worth not to store `nbytes` of parameters."""


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """Latency and bandwidth per collective, roofline per op.

    The defaults are a machine on which splitting pays even for small models: only the ratios
    matter. They are those of an accelerator in a fast node, without latency, and with pointwise
    ops as cheap as if they were fused.
    """

    latency_s: float = 1e-9
    bandwidth: float = 100e9
    flops_per_s: float = 100e12
    memory_bandwidth: float = 10e12
    half_reduce: float = 1.5
    """A gather or scatter, where an all-reduce is 2: two calls cost more than one."""
    state_per_parameter_byte: float = 640.0
    """What a stored parameter byte weighs, in bytes moved: gradient, optimizer state and update,
    and that saving memory is what tp is for."""

    @property
    def hides(self) -> bool:
        return True

    def primitive_s(self, primitive: Primitive, nbytes: int, ranks: int) -> float:
        if primitive is Primitive.IDENTITY:
            return 0.0
        if primitive not in COMMUNICATES:
            return 8 * nbytes / self.memory_bandwidth  # not fused: copies, zeros, and their sums
        rounds = 2.0 if primitive is Primitive.ALL_REDUCE else self.half_reduce
        moved = nbytes * (ranks - 1) / ranks
        if primitive is Primitive.ALL_TO_ALL:
            moved /= ranks
        return rounds * ((ranks - 1) * self.latency_s + moved / self.bandwidth)

    def op_s(self, flops: float, nbytes: float) -> float:
        return max(flops / self.flops_per_s, nbytes / self.memory_bandwidth)

    def packed_s(self, nbytes: float) -> float:
        return 0.0  # as if fused

    def stored_s(self, nbytes: int) -> float:
        return nbytes * self.state_per_parameter_byte / self.memory_bandwidth


@dataclass(frozen=True, slots=True)
class DataPrices:
    """Prices of the dp axis: communication inside a block couples the samples, so it is avoided at
    any price. A sum can still be taken over all micro-batches; other communication cannot."""

    @property
    def hides(self) -> bool:
        return True

    def primitive_s(self, primitive: Primitive, nbytes: int, ranks: int) -> float:
        if primitive is Primitive.ALL_REDUCE:
            return 1.0 + nbytes * 1e-12
        if primitive in COMMUNICATES:
            return 100.0 + nbytes * 1e-12
        return 0.0 if primitive is Primitive.IDENTITY else nbytes * 1e-12

    def op_s(self, flops: float, nbytes: float) -> float:
        return max(flops * 1e-14, nbytes * 1e-12)

    def packed_s(self, nbytes: float) -> float:
        return 0.0

    def stored_s(self, nbytes: int) -> float:
        return 0.0
