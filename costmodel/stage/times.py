"""Seconds of the blocks of a stage, and of what goes to and from its host."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """One block: computing, and collectives on its way, in each direction."""

    forward_s: float
    tensor_forward_s: float
    again_s: float
    """Its forward within the backward; 0 unless it is recomputed."""
    input_s: float
    weight_s: float
    accumulate_s: float
    """Of `weight_s`: adding to gradients that are there already."""
    split_s: float
    """What a backward in two halves takes more."""
    tensor_backward_s: float
    overhead_s: float = 0.0
    """Of the runtime, where its times do not have it."""
    leaves_s: float = 0.0
    """Waits after its forward, for what goes to the host."""
    returns_s: float = 0.0
    """Waits before its backward, for what comes back."""
    fetched_s: float = 0.0
    """Waits before its forward, for parameters that come from the host."""
    beside_forward_s: float = 0.0
    """Of its collectives, what nobody waits for, on links that other messages need."""
    beside_backward_s: float = 0.0


@dataclass(frozen=True)
class HostWaits:
    """Seconds of a step beside what is moved in every micro-batch."""

    leaves_s: tuple[float, ...] = ()
    """Per block, after its last backward; empty: nothing leaves."""
    each_s: tuple[float, ...] = ()
    """The same after every backward."""
    tail_s: float = 0.0
    """From the last backward until all gradients are on the host."""
    brings_s: float = 0.0
    """By which values that come back make the next forward longer, or the step's end."""
    hidden_s: float = 0.0
    """Of that, what goes on beside the next forward."""


NO_WAITS = HostWaits()
