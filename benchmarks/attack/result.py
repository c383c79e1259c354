"""What one attack found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One attack, and whether the product held: it was right, or it refused in words."""

    name: str
    held: bool
    what: str
    """What happened, in a few words: `refused: ...`, `equal to 1e-12`, `ZeroDivisionError`."""
    seconds: float = 0.0
