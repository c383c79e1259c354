"""Kinds of adapters, one file each; the file name is its key. MESHWRIGHT_ADAPTERS names folders
with more.

A file has `KIND`, an `AdapterKind`.
"""

import sys
from dataclasses import dataclass

from meshwright.ir.extensions import Files, add_folders

add_folders("MESHWRIGHT_ADAPTERS", __path__)
_FILES = Files(sys.modules[__name__], "kind of adapter")
KINDS = _FILES.names


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """The shape of an adapter: what it reads of a layer's inputs and makes of its outputs."""

    pooled: int = 1
    """Neighbouring inputs whose mean it reads; 0: as many as the base has in a block."""
    repeated: int = 1
    """Neighbouring outputs that get the same value."""
    ranks: int = 1
    """Its rank, per rank that was asked for."""


def adapter_kind(name: str) -> AdapterKind:
    """Returns a kind by its key. PlanError names the nearest if there is none."""
    found: AdapterKind = _FILES.load(name).KIND
    return found
