"""What two plans are predicted to take: time, memory, communication."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import RankMemory
from meshwright.ir.plan.show import SHARES

Unit = Literal["s", "bytes", "samples/s"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of both; None where a plan does not say."""

    section: str
    what: str
    unit: Unit
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """Relative: 0.1 is 10 % more."""
        if self.first is None or self.second is None or not self.first:
            return None
        return self.second / self.first - 1


def figures(a: Plan, b: Plan) -> tuple[Figure, ...]:
    """All that both or one of them predict."""
    return (*_time(a, b), *_memory(a, b), *_traffic(a, b))


def _both(
    section: str, unit: Unit, a: Mapping[str, float], b: Mapping[str, float], names: Iterable[str]
) -> list[Figure]:
    """What neither has, or has as nothing, is left out."""
    return [
        Figure(section, name, unit, a.get(name), b.get(name))
        for name in names
        if a.get(name) or b.get(name)
    ]


def _time(a: Plan, b: Plan) -> list[Figure]:
    if not a.predicted and not b.predicted:
        return []
    rate = [plan.predicted.samples_per_s if plan.predicted else None for plan in (a, b)]
    parts = _both("time", "s", _seconds(a), _seconds(b), ("step", *SHARES.values()))
    return [*parts[:1], Figure("time", "samples per second", "samples/s", *rate), *parts[1:]]


def _seconds(plan: Plan) -> dict[str, float]:
    """The step, and where it goes on the rank that waits least."""
    predicted = plan.predicted
    if predicted is None:
        return {}
    found = {"step": predicted.step_s}
    if predicted.breakdown:
        parts = predicted.breakdown
        found |= {text: getattr(parts, f"{name}_s") for name, text in SHARES.items()}
    return found


def _memory(a: Plan, b: Plan) -> list[Figure]:
    """Of the fullest rank of each."""
    first, second = _peak(a), _peak(b)
    return _both("memory", "bytes", first, second, dict.fromkeys((*first, *second)))


def _peak(plan: Plan) -> dict[str, float]:
    if plan.predicted is None:
        return {}
    memory = max((s.memory for s in plan.predicted.stages), key=lambda m: m.used_bytes)
    parts = {
        field.name.removesuffix("_bytes"): float(getattr(memory, field.name))
        for field in fields(RankMemory)
        if field.name != "process_bytes"
    }
    return {"fullest rank": float(memory.used_bytes), **parts}


def _traffic(a: Plan, b: Plan) -> list[Figure]:
    """Bytes that all ranks send in a step."""
    first, second = _sent(a), _sent(b)
    return _both("communication", "bytes", first, second, dict.fromkeys((*first, *second)))


def _sent(plan: Plan) -> dict[str, float]:
    detail = plan.predicted.detail if plan.predicted else None
    if detail is None:
        return {}
    found: dict[str, float] = defaultdict(float)
    for index, stage in enumerate(plan.stages):
        for one in detail.stage(index).traffic:
            nbytes = one.nbytes * len(stage.devices)
            found["all ranks"] += nbytes
            found[f"{one.purpose} over {one.axis}, {one.link}"] += nbytes
    return dict(found)
