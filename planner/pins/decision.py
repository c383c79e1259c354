"""The record of a decision that is pinned by NAME=VALUE; each is a file of `planner/decisions`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.pins.decisions import Pin, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which values there are, where one may be pinned, and how it is read from a plan."""

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
