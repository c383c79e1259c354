"""What a search for places of a kernel finds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """A place that is right for a kernel, or looks right and is not."""

    where: str
    why: str = ""
    """Why it is not."""
