"""The record of a decision that is pinned by NAME=VALUE; each is a file of `planner/decisions`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.pins.decisions import Constraint, Pin, Value

if TYPE_CHECKING:
    from meshwright.planner.problem.candidates import StageChoice
    from meshwright.planner.problem.problem import Problem


class Machinery(NamedTuple):
    """How much machinery a plan has of a decision: of plans that tie, the one with least wins."""

    rank: int
    """Of two decisions, which is weighed first."""
    of: Callable[[Plan], int]
    said: str = ""
    """What it counts, where that is told as the reason why a plan lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which values there are, where one may be pinned, how it is read from a plan, what a plan gets
    of it, and all that is said of it; the rest of the planner walks over what decisions say."""

    words: tuple[str, ...] | None = None
    """Legal values; empty: any word; None: whole numbers."""
    least: int = 1
    most: int | None = None
    """Of whole numbers."""
    scope: Literal["plan", "stages", "blocks"] = "stages"
    """What a pin is for: the whole plan; also one stage, or where some blocks run; only blocks."""
    read: Callable[[Plan, Stage], Value] | None = None
    """The value that a plan has in a stage; None: it has none of its own."""
    read_block: Callable[[Stage, Block], Value] | None = None
    """The value of a block, where blocks of a stage may differ."""
    means: Mapping[Value, Value] = field(default_factory=dict)
    """Value -> the one that searchers choose where it is pinned, of which plans then make it."""
    resolve: Callable[[Pin, Cluster | None], Constraint] | None = None
    """The constraint that a pin is on a cluster; PlanError if it has no such thing."""
    check: Callable[[str, Pin], None] | None = None
    """Raises PlanError for a pin, given with its text, that cannot be though its values can."""
    together: Callable[[Pin, tuple[Pin, ...]], tuple[Pin, ...]] | None = None
    """The pins that follow from one, given with all of them; PlanError for two that exclude each
    other."""
    admits: Callable[[Pin, Stage], bool] | None = None
    """Whether a stage keeps a pin, where that is more than its value."""
    keeps: Callable[[Pin, Plan, Graph], bool | None] | None = None
    """Whether a plan keeps a pin, where that is more than what its stages do; None: it is not."""
    apply: Callable[[Stage, Value, Callable[[], Schedule]], Stage] | None = None
    """The stage of a plan with the value that is pinned everywhere, where it may have it under the
    schedule; else a searcher knows how to make plans of a value."""
    apply_plan: Callable[[Plan, Graph, Value], Plan] | None = None
    """The same of all stages at once."""
    obey: "Callable[[Problem, StageChoice, Sequence[Pin]], StageChoice] | None" = None
    """A searcher's stage with what these pins of it, and of single blocks, ask for."""
    tries: tuple[Value, ...] = ()
    """Values that a search gives its best plans by `apply` where pins leave them."""
    variants: "Callable[[Problem, Plan], Iterator[Plan]] | None" = None
    """Variants of one of its best plans that a search tries, where that is more than a value."""
    refused: "Callable[[Problem, Pin], str] | None" = None
    """Why no plan of a problem keeps a pin; empty where that is not known beforehand."""
    findings: Callable[[Plan], Iterator[Finding]] | None = None
    """What `meshwright check` warns of in a plan."""
    notes: "Callable[[Problem, Plan], Iterator[str]] | None" = None
    """What a reader of a plan should know of it, in sentences."""
    place: int = 100
    """Where it is said among others: ascending, then by name."""
    mesh: Callable[[Plan], str] | None = None
    """Its word beside the sizes of a plan's axes; empty for none."""
    words_of: Callable[[Plan], Sequence[str]] | None = None
    """Its words in the name of a plan."""
    kind: Callable[[Stage], str] | None = None
    """Its word among the forms of parallelism that a stage uses, whatever their sizes."""
    machinery: Machinery | None = None
    of_stages: bool = False
    """Whether who pins it says something of pipeline stages."""
    show: Callable[[Stage], str] | None = None
    """The value in a difference of two plans; `-` for the usual one. None: other rows say it."""

    def explain(self, name: str, plan: Plan) -> str:
        """What a plan has in its stages, such as `tp=2/4`; empty where it has no value."""
        if self.read is None:
            return ""
        values = dict.fromkeys(str(self.read(plan, stage)) for stage in plan.stages)
        return f"{name}={'/'.join(values)}"

    def legal(self, text: str) -> Value | None:
        """The value that a text says; None if it is not legal."""
        if self.words is not None:
            return text if text in self.words or not self.words else None
        if not text.isdecimal() or int(text) < self.least:
            return None
        return int(text) if self.most is None or int(text) <= self.most else None

    def numbers(self) -> str:
        """Which whole numbers are legal, in words."""
        if self.most is None:
            return f"a whole number from {self.least}"
        *some, last = map(str, range(self.least, self.most + 1))
        return f"{', '.join(some)} or {last}"
