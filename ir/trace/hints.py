"""What annotations in a user's code ask for, as data: which modules to replicate or split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

HintKind = Literal["replicate", "split", "stage"]


@dataclass(frozen=True, slots=True)
class Hint:
    """One annotation of one module or parameter."""

    kind: HintKind
    path: str
    """Module path, standing for all parameters inside, or the path of one parameter."""
    size: int | None = None
    """Replicas, parts, or the number of the stage; None leaves it to the search."""

    def __str__(self) -> str:
        inside = "" if self.size is None else str(self.size)
        return f"{self.kind}({inside}) {self.path}"


Mark = tuple[HintKind, int | None]
"""A hint without its place."""


def hints_of(marks: Mapping[str, Sequence[Mark]]) -> tuple[Hint, ...]:
    """The fewest hints that say what the marks of all parameters say.

    `marks`: per parameter path, in the order of the model, outermost first; the innermost one of a
    kind counts, and of replicate and split the innermost one of both.
    """
    held = {path: frozenset(_effective(found)) for path, found in marks.items()}
    hints: dict[Hint, None] = {}
    for path, found in held.items():
        for kind, size in sorted(found, key=str):
            whole = _widest(path, (kind, size), held)
            hints[Hint(kind, whole, size)] = None
    return tuple(hints)


def _effective(found: Iterable[Mark]) -> list[Mark]:
    places = [mark for mark in found if mark[0] != "stage"]
    stages = [mark for mark in found if mark[0] == "stage"]
    return [*places[-1:], *stages[-1:]]


def _widest(path: str, mark: Mark, held: Mapping[str, frozenset[Mark]]) -> str:
    """The outermost module around a parameter all of whose parameters have the mark."""
    parts = path.split(".")
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth]) + "."
        if all(mark in found for name, found in held.items() if name.startswith(prefix)):
            return prefix[:-1]
    return path
