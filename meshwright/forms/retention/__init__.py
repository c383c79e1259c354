"""One file per answer to what becomes of what the ops of a block make and its backward needs; the
file name is its key. MESHWRIGHT_RETENTION names folders with more.

A file has `RETENTION`, a `Retention`, with both halves: `describe` says what is left of a memory
until the backward, `build` makes what holds it so on a rank (`forms.retaining`). Plans name forms
by key, op by op or for a whole block (`Stage.saved`; `Stage.recompute` is short for the latter).
Cost model, planner, reports and runtime branch on what a form says, never on which it is. A form
may instead choose, for the ops of a block, among others.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, Protocol

from torch import device

from meshwright.forms.retaining import AS_IT_IS, Footprint, RetentionRun
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.graph.graph import DTYPE_BYTES, Block
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import EARLY

add_folders("MESHWRIGHT_RETENTION", __path__)
_FILES = Files(sys.modules[__name__], "retention")
RETENTIONS = _FILES.names
"""Keys of the forms: the file names."""
KEEP = "keep"
"""The form of what no plan says anything of."""
AGAIN: Literal["full"] = "full"
"""The form that `Stage.recompute` is short for."""


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


def _as_it_is(dtype: str) -> Footprint:
    return AS_IT_IS


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What becomes of a value between forward and backward: what it costs and how it runs."""

    exact: bool = True
    """Whether the backward reads the very same numbers."""
    offered: bool = True
    """Whether `saved=` may ask for it and a search may choose it, block by block."""
    unit: Literal["op", "block"] = "op"
    """Of what plans say it: of what an op makes, or of all that a block makes, and then only what
    enters the block is held."""
    describe: Callable[[str], Footprint] = _as_it_is
    """Returns what is left of a memory of values of a dtype (`float32`, `int64`...). What has
    nothing held or moved is made again: its maker runs before the backward of its block."""
    build: Callable[[device], RetentionRun] | None = None
    """Makes what holds memories otherwise in a stage; None: autograd holds them as they are, or
    nothing is held."""
    fate: str = ""
    """The form that plans name for the ops that this one chooses; itself if empty."""
    choose: Callable[[Savings, float], Collection[str]] | None = None
    """Names the makers of a block whose forward takes so many seconds; None for all of them."""
    share: Callable[[int, float], Sequence[float]] | None = None
    """Returns, of so many stages, the share of its layers of which each says `fate`, if the first
    says it of the share that is given: the first layers of a stage keep theirs. `recompute=` may
    ask for it."""
    decide: Callable[[str, str], str] | None = None
    """Says while training, once for each run of a block (block, maker), which other form it is;
    equal on all ranks of a replica. The maker is empty where the block is asked for as one. It is
    priced as its own figures say."""

    @cached_property
    def again(self) -> bool:
        """Whether makers run again."""
        return not any(found.held or found.moved for found in self._footprints)

    @cached_property
    def moved(self) -> bool:
        """Whether something goes to the host's memory."""
        return any(found.moved for found in self._footprints)

    @cached_property
    def moved_least(self) -> float:
        """Bytes per byte that go there of any dtype."""
        return min(found.moved for found in self._footprints)

    @property
    def _footprints(self) -> list[Footprint]:
        return [self.describe(dtype) for dtype in DTYPE_BYTES]

    def wrong(self) -> Iterator[str]:
        """Yields what its two halves say that does not go together, and what would be legal."""
        found = self._footprints
        if not self.again and not all(f.held or f.moved for f in found):
            yield "makers run again for all dtypes or for none: describe all of them alike"
        if self.again and self.build is not None:
            yield "where nothing is held there is nothing for `build` to hold: leave it out"
        changes = any(f != AS_IT_IS for f in found) and not self.again
        if changes and self.build is None and self.decide is None and self.choose is None:
            yield "what is held otherwise than as it is needs `build`"
        if self.share is not None and not _is_whole(self.fate):
            yield "a share of layers is of a form of whole blocks: `fate` names it, such as 'full'"
        if self.unit == "block" and not (self.again or self.decide):
            yield "a block as one runs again: describe it as NOTHING, or take unit 'op'"


@cache
def retention(name: str) -> Retention:
    """Loads a form by its key. PlanError names the nearest if there is none, or what is wrong."""
    found = _FILES.load(name).RETENTION
    if not isinstance(found, Retention):
        raise PlanError(f"RETENTION in the file of retention {name!r} is none: {found!r}")
    for wrong in found.wrong():
        raise PlanError(f"retention {name!r}: {wrong}")
    return found


def decided(form: Retention, block: str, maker: str) -> Retention:
    """Returns the form that one decides on for a run of a block; itself if it decides nothing."""
    return retention(form.decide(block, maker)) if form.decide else form


@cache
def _is_whole(name: str) -> bool:
    return name in RETENTIONS and retention(name).unit == "block"


def of_block(policy: Iterable[tuple[str, str]]) -> str:
    """Returns the form that a policy (patterns of makers, and what becomes of what they make) names
    for the block as one; empty if it is of single ops."""
    return next((how for _, how in policy if _is_whole(how)), "")


def whole_form(stage: Stage, block: Block) -> str:
    """Returns the form that a stage names for a block as one, by `recompute` or by `saved`."""
    how = stage.recompute.get(block.name, stage.recompute.get(block.pattern, "none"))
    return how if how != "none" else of_block(stage.keeping(block).items())


def fate_of(name: str) -> str:
    """Returns what plans name where a form is chosen."""
    return retention(name).fate or name


def moves(name: str) -> bool:
    """Tells whether a form moves values to the host."""
    return name in RETENTIONS and retention(fate_of(name)).moved


def moves_all(name: str) -> bool:
    """Tells whether a form moves all of what it is said of, whatever that is of."""
    form = retention(name)
    return form.choose is None and form.moved_least >= 1


@cache
def offered() -> tuple[str, ...]:
    """Lists the keys that a search may choose."""
    return tuple(sorted(name for name in RETENTIONS if retention(name).offered))


@cache
def shared_out() -> tuple[str, ...]:
    """Lists the keys that say of how many layers of each stage another form is said."""
    return tuple(sorted(name for name in RETENTIONS if retention(name).share is not None))


def said_by(plan: Plan) -> frozenset[str]:
    """Returns the forms that a plan names."""
    return _said(plan.stages)


def _said(stages: Iterable[Stage]) -> frozenset[str]:
    found: set[str] = set()
    for stage in stages:
        found.update(*(policy.values() for policy in stage.saved.values()))
        found.update(stage.recompute.values())
    return frozenset(found - {"none"})


def names_of(plan: Plan) -> tuple[str, ...]:
    """Lists the forms that may have been chosen for a plan, those that move first."""
    said = said_by(plan)
    return tuple(
        sorted((name for name in offered() if fate_of(name) in said), key=lambda n: not moves(n))
    )


def findings(plan: Plan) -> Iterator[Finding]:
    """Yields what is wrong with the forms of retention that a plan names."""
    for name in sorted(said_by(plan) - set(RETENTIONS)):
        message = f"saved asks for {name!r}, which is no form of retention"
        yield Finding("saved", message, nearest(name, RETENTIONS))
    for index, stage in enumerate(plan.stages):
        for block, policy in stage.saved.items():
            if (name := of_block(policy.items())) and policy != {"*": name}:
                message = f"stage {index}: {name!r} is said of some ops of {block}"
                message += ", and is for a block as one"
                yield Finding("saved", message, f'{{"*": "{name}"}}')
    yield from _early(plan)


def _early(plan: Plan) -> Iterator[Finding]:
    """What is held otherwise, or decided while training, is not made again ahead."""
    try:
        ranks = plan.schedule.parse().ranks
    except PlanError:
        return  # for the rules of schedules to say
    for index in sorted({a.stage for row in ranks for a in row if a.work in EARLY}):
        for name in sorted(_said(plan.stages[index : index + 1]) & set(RETENTIONS)):
            form = retention(name)
            if form.build is not None or form.decide is not None:
                message = f"stage {index}: the schedule keeps or makes again what is to be {name!r}"
                near = f"a schedule without K and R, or no {name!r}"
                yield Finding("schedule", message, near)
                break


def check(plan: Plan) -> None:
    """PlanError with the first that `findings` has."""
    for finding in findings(plan):
        raise PlanError(str(finding))
