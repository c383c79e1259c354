"""What a search for places of a kernel finds."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundSpot:
    """A place that is right for a kernel, or looks right and is not."""

    where: str
    why: str = ""
    """Why it is not."""
    stage: int = 0
    block: str = ""
    """The first that is alike in the stage; none if the place is the stage."""
    op: str = ""
    """`Op.key` in the block."""


Worth = Callable[[str, FoundSpot], str]
"""Of a kernel at a place that is right for it: "" if it is worth it there, else why not."""
