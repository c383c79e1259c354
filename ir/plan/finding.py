"""What is wrong with a plan: a rule, words, and the nearest legal value."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

SHOWN = 16
"""Numbers that a message shows, and findings of a kind that there can be thousands of."""
LONGEST = 200
"""Characters of a name for which the nearest is looked for: that takes the square of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule."""

    rule: str
    message: str
    nearest: str = ""
    severity: Literal["error", "warning", "note"] = "error"
    """A note says what is right, and why."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}" + (f"; nearest: {self.nearest}" * bool(self.nearest))


def nearest_name(name: str, known: Iterable[str]) -> str:
    name, names = name[:LONGEST], list(known)
    begins = [other for other in names if other.startswith(name)]
    return next(iter(begins + difflib.get_close_matches(name, names, 1, 0.0)), "")


def few(numbers: Sequence[int]) -> str:
    """The first of them, for a message."""
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return f"[{shown}, ...]" if len(numbers) > SHOWN else f"[{shown}]"
