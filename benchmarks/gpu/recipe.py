"""A plan that a step runs, as data: searched ahead of the day, or there where that was not done."""

from dataclasses import dataclass

EAGER = ("recompute=none", "saved=none", "num_microbatches=1")
PLAIN = (*EAGER, "capture=false")
"""Pins of a plan that does what eager PyTorch does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which model, and what is asked of the search."""

    name: str
    """Of the plan's file."""
    workload: str
    pins: tuple[str, ...] = PLAIN
    dropout: float = 0.0
    kernels: str = "none"
    """none, auto or all, as a search takes them."""
    largest: bool = False
    """Of the largest batch that a search finds a plan for."""
