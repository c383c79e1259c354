"""An explanation for people, and as data."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Alternative, RankMemory
from meshwright.ir.plan.show import MEMORY_CATEGORIES, SHARES, STYLE, ranges, seconds
from meshwright.ir.text.units import size, size_unit
from meshwright.tools.explain.answers import Answer
from meshwright.tools.explain.binding import Sentence, binding, levers
from meshwright.tools.explain.experts import Experts, where_experts_lie
from meshwright.tools.explain.facts import Facts


@dataclass(frozen=True)
class Explanation:
    """All that can be said of a plan without its model."""

    facts: Facts
    binding: tuple[Sentence, ...]
    levers: tuple[str, ...]
    experts: tuple[Experts, ...]

    @classmethod
    def of(cls, plan: Plan) -> "Explanation":
        facts = Facts.of(plan)
        return cls(facts, binding(facts), levers(facts), where_experts_lie(plan))


def render(found: Explanation) -> RenderableType:
    """As tables and sentences."""
    plan = found.facts.plan
    title = f"{plan.model.name} on {plan.cluster.name}, {seconds(found.facts.step_s)} per step"
    parts: list[RenderableType] = [Text(title, style="bold"), _time(found.facts)]
    parts.append(_memory(found.facts))
    parts += [heading("What binds"), *(point(s.text) for s in found.binding)]
    if found.experts:
        parts += [heading("Where experts lie"), *(point(e.text) for e in found.experts)]
    parts += _others(plan)
    if found.levers:
        parts += [heading("What would change it, by the plan's own figures")]
        parts += [point(text) for text in found.levers]
    return Group(*parts)


def heading(text: str) -> Text:
    """Of what follows."""
    return Text(f"\n{text}", style="italic")


def point(text: str) -> Text:
    """One of several things to know."""
    return Text(f"- {text}")


def _time(facts: Facts) -> Table:
    """Shares of the step, equal ranks together."""
    table = Table(title="Where the step goes, in % of it", **STYLE)
    used = [k for k in SHARES if any(s.get(k, 0.0) >= facts.step_s * 5e-4 for s in facts.seconds)]
    table.add_column("ranks", no_wrap=True)
    table.add_column("stages", no_wrap=True)
    for name in used:
        table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    for ranks in facts.groups:
        own = facts.seconds[ranks[0]]
        stages = sorted(stage for rank in ranks for stage in facts.stages(rank))
        shares = [own.get(name, 0.0) / facts.step_s for name in used]
        table.add_row(ranges(ranks), ranges(tuple(stages)), *(f"{100 * s:.1f}" for s in shares))
    return table


TINY = 0.002
"""Of the fullest rank: what is less has no column."""
_SHORT = {"tensor": "comm.", "wait": "waiting", "gradients": "grads", "optimizer": "optim.",
          "overhead": "overh."}  # fmt: skip


def _memory(facts: Facts) -> Table:
    """Peaks, equal ranks together, the fullest first."""
    groups: dict[tuple[RankMemory, int | None, int], list[int]] = {}
    for rank in range(len(facts.seconds)):
        key = facts.memory(rank), facts.room(rank), facts.in_flight(rank)
        groups.setdefault(key, []).append(rank)
    most = max(memory.used_bytes for memory, _, _ in groups)
    used = [
        name
        for name in MEMORY_CATEGORIES
        if max(getattr(memory, f"{name}_bytes") for memory, _, _ in groups) >= TINY * most
    ]
    unit, scale = size_unit(most)
    title = f"Where memory goes at the peak, in {unit}; micro-batches in flight"
    table = Table(title=title, **STYLE)
    table.add_column("ranks", no_wrap=True)
    for name in (*(MEMORY_CATEGORIES[n] for n in used), "used", "of", "m.b."):
        table.add_column(name, justify="right", no_wrap=True)
    for (memory, room, flying), ranks in sorted(groups.items(), key=lambda g: -g[0][0].used_bytes):
        parts = [getattr(memory, f"{name}_bytes") for name in used]
        figures = [f"{part / scale:.2f}" for part in (*parts, memory.used_bytes)]
        limit = f"{room / scale:.2f}" if room else "?"
        table.add_row(ranges(tuple(ranks)), *figures, limit, str(flying))
    return table


def _others(plan: Plan) -> list[RenderableType]:
    others = plan.evidence.alternatives if plan.evidence else ()
    if not others:
        return []
    return [heading("Why not another kind"), *(point(_lost(other)) for other in others)]


def _lost(other: Alternative) -> str:
    took = f"{seconds(other.step_s)}, {size(other.peak_bytes)}"
    return f"{other.name} ({took}): {other.why}"


def as_data(found: Explanation, answers: list[Answer]) -> dict[str, Any]:
    """The same for programs."""
    facts = found.facts
    others = facts.plan.evidence.alternatives if facts.plan.evidence else ()
    return {
        "plan": facts.plan.hash,
        "step_s": facts.step_s,
        "ranks": [
            {"rank": rank, "stages": facts.stages(rank), "seconds": dict(own),
             "memory": asdict(facts.memory(rank)), "room_bytes": facts.room(rank),
             "in_flight": facts.in_flight(rank)}
            for rank, own in enumerate(facts.seconds)
        ],
        "binding": [asdict(sentence) for sentence in found.binding],
        "others": [asdict(other) for other in others],
        "levers": list(found.levers),
        "experts": [asdict(experts) | {"text": experts.text} for experts in found.experts],
        "answers": [asdict(answer) | {"text": answer.text} for answer in answers],
    }  # fmt: skip
