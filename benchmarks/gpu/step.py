"""What a step of the day is, where it runs, and the facts that it finds."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.claim import Claim
from benchmarks.gpu.recipe import Recipe
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files

if TYPE_CHECKING:
    from meshwright.ir.cluster.cluster import Cluster

Value = bool | int | float | str | None
Fact = tuple[str, Value]
"""Key and value. A key is `name`, or `row/column`, which pages show as a table. Its last word says
the unit: `step_s`, `used_bytes`, `share`."""
Facts = Mapping[str, Value]
SHARED = (
    "torch", "transformers", "meshwright.runtime.job.compile", "meshwright.planner.search.search",
    "meshwright.profiling.profiling", "benchmarks.gpu.planned", "benchmarks.gpu.eager",
)  # fmt: skip
"""What most steps import, models of transformers included."""
ERROR = "error"
"""Column of what a row of a step failed with."""
LONGEST = 2000
"""Characters of a text."""
BUDGET_S = 565.0
"""Of the whole day: machines are lent for ten minutes a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step runs, and what it finds there."""

    out: Path
    """Folder for what is to be kept: the profile, the log."""
    device: str
    """cuda, or cpu in a rehearsal."""
    rehearsal: bool = False
    """Everything is tiny, so that the code is tried and nothing is measured."""
    plans: Path
    """Folder of the plans that were searched before."""
    until: float
    """When the step is killed, on `time.monotonic`."""

    @property
    def left_s(self) -> float:
        """Seconds until then."""
        return max(0.0, self.until - time.monotonic())

    def text(self) -> str:
        """For another process of this machine."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def of_text(cls, text: str) -> "Place":
        """What `text` wrote."""
        data = json.loads(text)
        return cls(**data | {"out": Path(data["out"]), "plans": Path(data["plans"])})

    def of(self, full: int, tiny: int) -> int:
        """A size: the full one, or the tiny one in a rehearsal."""
        return tiny if self.rehearsal else full

    def cluster(self) -> "Cluster":
        """One device of this machine: its preset's, or as it was seen where there is none."""
        from meshwright.ir import presets
        from meshwright.ir.cluster.cluster import Cluster
        from meshwright.ir.cluster.detect import describe, see

        if self.device == "cpu":
            return Cluster.local(1)
        seen = describe([see()])
        name = seen.device_types[0].name
        return Cluster.preset(name, devices_per_node=1) if name in presets.PRESETS else seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to measure, in a process of its own."""

    name: str
    does: str
    """For the page."""
    order: int
    """Smaller ones first: what tells most per second, and what later steps read."""
    limit_s: float
    """It is killed then."""
    least_s: float
    """With less time than this it is left out."""
    gpus: int = 1
    """How many a machine must have for it; a rehearsal does without."""
    most_bytes: int = 0
    """Of host memory, its own and that of what it starts; 0: most of the machine's."""
    imports: tuple[str, ...] = SHARED
    """What the runner loads before it forks."""
    run: Callable[[Place], Iterator[Fact]]
    """Yields facts, each of which is kept at once, whatever happens later."""
    reads: tuple[str, ...] = ()
    """Steps whose files it reads, if they have left any."""
    recipes: tuple[Recipe, ...] = ()
    """Plans that it runs, which `--prepare` searches."""
    claims: tuple[Claim, ...] = ()
    """What the docs say of it."""

    def __post_init__(self) -> None:
        if not 0 < self.least_s <= self.limit_s <= BUDGET_S:
            raise PlanError(
                f"step {self.name}: least_s {self.least_s:g} and limit_s {self.limit_s:g}; it must "
                f"be 0 < least_s <= limit_s <= {BUDGET_S:g}"
            )


def load_steps() -> tuple[Step, ...]:
    """All steps of the folder in their order; PlanError if one is not what its file is called.

    A file that cannot be imported, for a package that this machine lacks, is a step that fails.
    """
    from benchmarks.gpu import steps

    files = Files(sys.modules[steps.__name__], "step")
    found = [(name, _load(files, name)) for name in files.names]
    for name, step in found:
        if step.name != name:
            raise PlanError(f"steps/{name}.py: its step is called {step.name!r}; call it {name!r}")
    return tuple(sorted((step for _, step in found), key=lambda step: (step.order, step.name)))


def _load(files: Files, name: str) -> Step:
    try:
        step: Step = files.load(name).STEP
    except ImportError as error:
        why = f"steps/{name}.py cannot be imported: {error}"

        def fail(place: Place) -> Iterator[Fact]:
            raise ImportError(why)

        return Step(name=name, does=why, order=0, limit_s=20.0, least_s=0.1, gpus=0, run=fail,
                    imports=())  # fmt: skip
    return step


def recipes_of(steps: Iterable[Step]) -> tuple[Recipe, ...]:
    """Those of all steps, each once; PlanError if two that differ have one name."""
    found: dict[str, Recipe] = {}
    for step in steps:
        for recipe in step.recipes:
            if found.setdefault(recipe.name, recipe) != recipe:
                raise PlanError(
                    f"step {step.name}: another recipe is called {recipe.name!r}, and both would "
                    "be one file: give it another name"
                )
    return tuple(found.values())


def checked(fact: object) -> Fact:
    """The fact, if it can be kept; PlanError says what is wrong with it."""
    if not (isinstance(fact, tuple) and len(fact) == 2 and isinstance(fact[0], str)):
        raise PlanError(f"a step yielded {fact!r:.80}; it must be (key, value), such as ('x_s', 1)")
    key, value = fact
    if not key or len(key) > 120 or key.count("/") > 1 or not key.isprintable():
        raise PlanError(f"fact {key!r:.80}: a key is printable, with at most one /, 120 characters")
    if isinstance(value, str):
        kept = "".join(c if c.isprintable() or c == "\n" else " " for c in value)
        return key, kept[:LONGEST]
    if value is not None and not isinstance(value, bool | int | float):
        raise PlanError(f"fact {key}: {value!r:.80} is no number, text, bool or None")
    if isinstance(value, float) and not isfinite(value):
        raise PlanError(f"fact {key} is {value}; it must be finite")
    return key, value


def guarded(row: str, facts: Iterator[Fact]) -> Iterator[Fact]:
    """The facts of one row of a step; if finding them fails, that is a fact, too, and others of
    the step can still be found."""
    try:
        yield from facts
    except Exception as error:
        traceback.print_exc()
        yield f"{row}/{ERROR}", f"{type(error).__name__}: {error}"


def each_in_time(
    place: Place, recipes: Iterable[Recipe], each_s: int, one: Callable[[Recipe], Iterator[Fact]]
) -> Iterator[Fact]:
    """The facts of each recipe, guarded; of one that takes `each_s` on a GPU where less is left,
    that it was left out."""
    for recipe in recipes:
        if place.left_s < place.of(each_s, 1):
            yield f"{recipe.name}/{ERROR}", f"left out: {place.left_s:.0f} s were left"
        else:
            yield from guarded(recipe.name, one(recipe))
