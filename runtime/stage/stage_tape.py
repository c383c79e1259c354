"""What a stage keeps of a micro-batch between its forward and its backward."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from meshwright.runtime.capture.calls import CaptureSlot
from meshwright.runtime.stage.chain import Chain
from meshwright.runtime.stage.keeping import Keeper
from meshwright.runtime.stage.kept_halves import HalvesKeeper
from meshwright.runtime.stage.split import WeightWork


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """Where a block's output stands in the block's graph."""

    name: str
    edge: GradientEdge
    dtype: torch.dtype


@dataclass(eq=False)
class StageTape:
    """What one micro-batch keeps for its backward."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    """Differentiable values that blocks of the stage read, or that it passes on."""
    received: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of what the stage has received and no more of its blocks will read."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Other values that a block reads which runs again as one."""
    outputs: list[list[Output]] = field(default_factory=list)
    """Per call; empty for one that runs again."""
    again: set[int] = field(default_factory=set)
    """Calls that run again as one: only what enters them is there."""
    still: set[int] = field(default_factory=set)
    """Calls that have no backward: no gradient comes to what they made."""
    weights: list[tuple[int, WeightWork | None]] = field(default_factory=list)
    chains: dict[int, Chain] = field(default_factory=dict)
    """By the number of their first call."""
    keepers: dict[int, Keeper | HalvesKeeper] = field(default_factory=dict)
    """Of the calls of whose ops the plan says what becomes of what they make."""
    whole: bool = False
    """All is there for the backward, whatever the plan says of the calls."""
    slot: CaptureSlot | None = None
    """Where its calls are replayed; None: they run as they are."""
