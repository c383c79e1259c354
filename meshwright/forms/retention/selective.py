"""As much as is cheap runs again: activations, norms and short attention, not large products."""

from collections.abc import Collection

from meshwright.forms.retention import Retention, Savings

CHEAP = 0.1
"""Of the block's forward, what may run again."""


def choose(block: Savings, forward_s: float) -> Collection[str]:
    """Saves the most bytes for so little."""
    return block.smallest(CHEAP * forward_s).keys


RETENTION = Retention(fate="recompute", choose=choose)
