"""One file per answer to what becomes of what the ops of a block make and its backward needs; the
file name is its key. MESHWRIGHT_RETENTION names folders with more.

A file has `RETENTION`, a `Retention`. Plans name forms by key, op by op (`Stage.saved`); cost model
and runtime read what they do. A form may instead choose, for the ops of a block, among others.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan

add_folders("MESHWRIGHT_RETENTION", __path__)
_FILES = Files(sys.modules[__name__], "retention")
RETENTIONS = _FILES.names
"""Keys of the forms: the file names."""
KEEP = "keep"
"""The form of what no plan says anything of."""


class Remade(Protocol):
    """Makers that run again, and what that gives."""

    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def again_s(self) -> float: ...
    @property
    def kept_bytes(self) -> int: ...


class Savings(Protocol):
    """What a form may ask of a block when it chooses."""

    @property
    def saved_bytes(self) -> Mapping[str, int]:
        """Maker (`ir.plan.keeping`) -> bytes that the backward needs of it."""

    def smallest(self, again_s: float) -> Remade:
        """Finds the fewest bytes if so many seconds of a forward may run again."""

    def fastest(self, kept_bytes: int) -> Remade | None:
        """Finds the fewest seconds that leave so many bytes; None if there are no such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What becomes of a value between forward and backward: what it costs and how it runs."""

    exact: bool = True
    """Whether the backward reads the very same numbers."""
    again: bool = False
    """Not held: its maker runs again before the backward of the block."""
    moved: bool = False
    """Moved to the host's memory, and fetched before that backward."""
    offered: bool = True
    """Whether `saved=` may ask for it and a search may choose it, block by block."""
    fate: str = ""
    """The form that plans name for the ops that this one chooses; itself if empty."""
    choose: Callable[[Savings, float], Collection[str]] | None = None
    """Names the makers of a block whose forward takes so many seconds; None for all of them."""
    decide: Callable[[str, str], str] | None = None
    """Says while training, once for each run of a block (block, maker), which other form it is;
    equal on all ranks of a replica. It is priced as its own figures say."""


@cache
def retention(name: str) -> Retention:
    """Loads a form by its key. PlanError names the nearest if there is none."""
    found = _FILES.load(name).RETENTION
    if not isinstance(found, Retention):
        raise PlanError(f"RETENTION in the file of retention {name!r} is none: {found!r}")
    return found


def fate_of(name: str) -> str:
    """Returns what plans name where a form is chosen."""
    return retention(name).fate or name


def moves(name: str) -> bool:
    """Tells whether a form moves values to the host."""
    return name in RETENTIONS and retention(fate_of(name)).moved


@cache
def offered() -> tuple[str, ...]:
    """Lists the keys that a search may choose."""
    return tuple(sorted(name for name in RETENTIONS if retention(name).offered))


def said_by(plan: Plan) -> frozenset[str]:
    """Returns the forms that a plan names."""
    return frozenset(
        how for stage in plan.stages for policy in stage.saved.values() for how in policy.values()
    )


def names_of(plan: Plan) -> tuple[str, ...]:
    """Lists the forms that may have been chosen for a plan, those that move first."""
    said = said_by(plan)
    return tuple(
        sorted((name for name in offered() if fate_of(name) in said), key=lambda n: not moves(n))
    )


def unknown(plan: Plan) -> Iterator[Finding]:
    """Finds the names in a plan's `saved` for which there is no form."""
    for name in sorted(said_by(plan) - set(RETENTIONS)):
        message = f"saved asks for {name!r}, which is no form of retention"
        yield Finding("saved", message, nearest(name, RETENTIONS))
