"""What a decision offers to an agent: numbers that do not depend on the size of the model."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Offered:
    """One decision."""

    context: Floats
    """Of the whole: what all options share."""
    options: Floats
    """Option x feature."""
    legal: Bools
    """Per option."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is ruled out before it is offered; each part can be turned off."""

    linkage: bool = True
    """Parameter dims that rules link are decided at once, and what would break a rule is not
    offered. Without it an episode that breaks a rule ends with `WORST`."""
    memory: bool = True
    """Options with which the parameters alone fill the devices are not offered."""
    radius: int | None = 2
    """Stages are cut at most so many blocks from where work is balanced; None: anywhere."""


class Decisions(Protocol):
    """A sequence of decisions, each among a few options."""

    context_names: tuple[str, ...]
    option_names: tuple[str, ...]
    """What the numbers are, in their order."""
    context_size: int
    option_size: int
    most_options: int

    def restart(self) -> None:
        """Begin a new episode."""

    def offered(self) -> Offered:
        """The decision that is due; nothing is legal once the episode is over."""

    def take(self, option: int) -> tuple[float, bool]:
        """Decide: the reward, and whether the episode is over."""


WORST = -4.0
"""Reward of an episode that leads nowhere."""
SLOWEST = -3.0
"""Plans that fit get at least this."""


def nothing(decisions: Decisions) -> Offered:
    """What is offered when all is decided."""
    return Offered(
        np.zeros(decisions.context_size, np.float32),
        np.zeros((0, decisions.option_size), np.float32),
        np.zeros(0, np.bool_),
    )


def reward_of(value: float, reference: float) -> float:
    """0 at the reference, -0.01 about one percent above it."""
    return float(np.clip(-np.log(value / reference), SLOWEST, -SLOWEST))
