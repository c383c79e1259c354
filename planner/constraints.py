"""What a user pins: `"tp=2"`, `"block transformer.h.3 on stage 1"`, `"memory<=60GB"`, as data."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwright.ir.device import parse_quantity
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.planner.schedule_tools import SCHEDULES

T = TypeVar("T", int, str)

NUMBERS = (
    "pp", "dp", "dp_replicate", "dp_shard", "tp", "zero", "prefetch", "num_microbatches",
)  # fmt: skip
"""`prefetch` of 1 or more asks for zero 3 everywhere: elsewhere there is nothing to fetch."""
WORDS = ("schedule", "recompute")
RECOMPUTE = ("none", "full")
EXAMPLES = "tp=2, schedule=gpipe, recompute=none, block h.3 on stage 1, memory<=60GB"


@dataclass(frozen=True, slots=True)
class Pin:
    """One decision, for every stage: `tp=2`."""

    name: str
    value: int | str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


@dataclass(frozen=True, slots=True)
class OnStage:
    """A block that must run in a stage."""

    block: str
    stage: int

    def __str__(self) -> str:
        return f"block {self.block} on stage {self.stage}"


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """No rank may need more."""

    nbytes: int

    def __str__(self) -> str:
        return f"memory<={self.nbytes}B"


Constraint = Pin | OnStage | MemoryCap

_PIN = re.compile(r"(\w+)\s*=\s*(\w+)")
_ON_STAGE = re.compile(r"block\s+(\S+)\s+on\s+stage\s+(\d+)")
_MEMORY = re.compile(r"memory\s*<=?\s*(.+)")


def parse_constraint(given: str | Constraint) -> Constraint:
    """The constraint that a text names; PlanError with the nearest one that exists."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    if match := _ON_STAGE.fullmatch(text):
        return OnStage(match[1], int(match[2]))
    if match := _MEMORY.fullmatch(text):
        nbytes = parse_quantity(match[1], "bytes")
        assert isinstance(nbytes, int)
        return MemoryCap(nbytes)
    if match := _PIN.fullmatch(text):
        return _pin(match[1], match[2])
    raise PlanError(f"constraint {given!r} is none that exists; write for example {EXAMPLES}")


def _pin(name: str, value: str) -> Pin:
    known = (*NUMBERS, *WORDS)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.0)[0]
        raise PlanError(f"constraint {name}={value}: there is no {name!r}; nearest is {near!r}")
    if name in NUMBERS:
        least = 0 if name in ("zero", "prefetch") else 1
        if not value.isdecimal() or int(value) < least or (name == "zero" and int(value) > 3):
            allowed = "0, 1, 2 or 3" if name == "zero" else f"a whole number from {least}"
            raise PlanError(f"constraint {name}={value}: it must be {allowed}")
        return Pin(name, int(value))
    allowed_words = SCHEDULES if name == "schedule" else RECOMPUTE
    if value not in allowed_words:
        near = difflib.get_close_matches(value, allowed_words, 1, 0.0)[0]
        raise PlanError(f"constraint {name}={value}: nearest legal value is {near!r}")
    return Pin(name, value)


def parse_constraints(given: Sequence[str | Constraint], graph: Graph) -> tuple[Constraint, ...]:
    """All constraints in a canonical order, checked against the model's block names."""
    found = {parse_constraint(item): None for item in given}
    names = [block.name for block in graph.blocks]
    for item in found:
        if isinstance(item, OnStage) and item.block not in names:
            near = difflib.get_close_matches(item.block, names, 1, 0.0)
            raise PlanError(f"constraint '{item}': no such block; nearest is {near[:1]}")
    return tuple(sorted(found, key=lambda item: (type(item).__name__, str(item))))


def pinned(constraints: Iterable[Constraint], name: str) -> int | str | None:
    """The value that a decision is pinned to; None if it is free."""
    return next((c.value for c in constraints if isinstance(c, Pin) and c.name == name), None)


def allowed(constraints: Iterable[Constraint], name: str, values: Iterable[T]) -> tuple[T, ...]:
    """Those of `values` that all pins of the decision leave."""
    pins = [c.value for c in constraints if isinstance(c, Pin) and c.name == name]
    return tuple(value for value in values if all(value == pin for pin in pins))


def stage_of_block(constraints: Iterable[Constraint], graph: Graph) -> dict[int, int]:
    """Block number -> the stage it is pinned to."""
    index = {block.name: i for i, block in enumerate(graph.blocks)}
    return {index[c.block]: c.stage for c in constraints if isinstance(c, OnStage)}


def memory_cap(constraints: Iterable[Constraint]) -> int | None:
    """The least cap in bytes."""
    return min((c.nbytes for c in constraints if isinstance(c, MemoryCap)), default=None)


def broken(constraints: Iterable[Constraint], plan: Plan, graph: Graph) -> tuple[Constraint, ...]:
    """The constraints that a plan does not keep; memory is judged apart, device by device."""
    return tuple(item for item in constraints if not _holds(item, plan, graph))


def _holds(item: Constraint, plan: Plan, graph: Graph) -> bool:
    if isinstance(item, MemoryCap):
        return True
    if isinstance(item, OnStage):
        stage = plan.stage_blocks(graph, item.stage) if item.stage < len(plan.stages) else ()
        return any(block.name == item.block for block in stage)
    match item.name:
        case "pp":
            return len(plan.schedule.rows) == item.value
        case "num_microbatches":
            return plan.num_microbatches == item.value
        case "schedule":
            return plan.schedule.name == item.value
        case "dp":
            return all(stage.dp == item.value for stage in plan.stages)
        case "zero":
            return all(stage.zero == item.value for stage in plan.stages)
        case "prefetch":
            fetching = all(stage.zero == 3 for stage in plan.stages) or not item.value
            return fetching and all(stage.prefetch == item.value for stage in plan.stages)
        case "recompute":
            return all(
                any(how == "full" for how in stage.recompute.values()) == (item.value == "full")
                for stage in plan.stages
            )
    return all(stage.mesh.get(item.name, 1) == item.value for stage in plan.stages)
