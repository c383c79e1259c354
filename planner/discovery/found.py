"""What trying an op found, as data."""

from dataclasses import dataclass

Dim = int | None
"""The dim of a tensor that a split cuts; None where it cuts none."""


@dataclass(frozen=True, slots=True, order=True)
class DimCut:
    """Dims that are split together; an output without one is a sum."""

    inputs: tuple[Dim, ...]
    outputs: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class FoundRule:
    """How an op may be split, and the sets of inputs in which it is linear."""

    cuts: tuple[DimCut, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
