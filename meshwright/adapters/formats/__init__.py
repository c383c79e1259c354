"""Formats of quantised weights, one file each; the file name is its key. MESHWRIGHT_FORMATS names
folders with more.

A file has `FORMAT`, a `WeightFormat`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders

add_folders("MESHWRIGHT_FORMATS", __path__)
_FILES = Files(sys.modules[__name__], "format of weights")
FORMATS = _FILES.names


class Encoded(NamedTuple):
    """Blocks of values in few bits (`ir.graph.quantised`)."""

    codes: Tensor
    """uint8 [out, groups, block], not packed yet."""
    scale: Tensor
    """[out, groups]"""
    zero: Tensor | None
    """[out, groups]; None: codes number the values of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How values are kept."""

    bits: int
    """Of each code: 4 or 8."""
    encode: Callable[[Tensor], Encoded]
    """From values [out, groups, block]."""
    zeros: bool
    """Whether each block has a zero point, into which an adapter may be merged."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise PlanError(f"a format of {self.bits} bits cannot be packed; nearest are 4 and 8")


def weight_format(name: str) -> WeightFormat:
    """Returns a format by its key. PlanError names the nearest if there is none."""
    found: WeightFormat = _FILES.load(name).FORMAT
    return found


def evenly(values: Tensor, bits: int) -> Encoded:
    """Encodes blocks [out, groups, block] between their least and their largest value, with zero
    points that need not be whole; a block of equal values keeps them exactly."""
    low, high = values.amin(-1), values.amax(-1)
    scale = (high - low) / (2**bits - 1)
    scale = scale.where(scale > 0, scale.new_ones(()))
    codes = ((values - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round_().clamp_(0, 2**bits - 1)
    return Encoded(codes, scale, -low / scale)
