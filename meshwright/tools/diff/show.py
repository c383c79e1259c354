"""A comparison of two plans for people, and as data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import content_hash, rehash
from meshwright.ir.plan.show import STYLE, seconds
from meshwright.ir.plan.verify import check
from meshwright.ir.text.units import size
from meshwright.tools.diff.figures import Figure, figures
from meshwright.tools.diff.rows import DiffRow, structure

ROWS = 40
"""Differences of structure that are shown to people."""


@dataclass(frozen=True)
class PlanDifference:
    """Between two plans."""

    first: str
    second: str
    """Their names for people."""
    same: str
    """In how far they are equal; empty if they are not."""
    structure: tuple[DiffRow, ...]
    figures: tuple[Figure, ...]


def difference(a: Plan, b: Plan, names: Sequence[str] = ("a", "b")) -> PlanDifference:
    """Empty where both do the same."""
    check(a)
    check(b)
    rows, found = structure(a, b), figures(a, b)
    same = ""
    if rehash(a).seal == rehash(b).seal:
        same = "the plans are equal"
    elif content_hash(_bare(a)) == content_hash(_bare(b)):
        same = "the plans do the same; only what is said about them differs"
    return PlanDifference(names[0], names[1], same, rows, found)


def _bare(plan: Plan) -> Plan:
    """Only what is executed."""
    cluster = replace(plan.cluster, fingerprint="")
    return replace(plan, predicted=None, evidence=None, notes=(), versions={}, profile=None,
                   constraints=(), objective="throughput", cluster=cluster, hash="")  # fmt: skip


def render(found: PlanDifference) -> RenderableType:
    """Tables; of equal plans one line."""
    changed = [figure for figure in found.figures if figure.first != figure.second]
    parts: list[RenderableType] = [Text(found.same)] if found.same else []
    if found.structure:
        parts.append(_structure(found))
    if changed:
        parts.append(_figures(found))
    return Group(*parts)


def _structure(found: PlanDifference) -> RenderableType:
    table = Table(title="What differs", **STYLE)
    for name in ("", "what", found.first, found.second):
        table.add_column(Text(name))
    section = ""
    for row in found.structure[:ROWS]:
        shown = "" if row.section == section else row.section
        table.add_row(*map(Text, (shown, row.what, row.first, row.second)))
        section = row.section
    more = len(found.structure) - ROWS
    note = [Text(f"and {more} more differences; --json tells all")] if more > 0 else []
    return Group(table, *note)


def _figures(found: PlanDifference) -> Table:
    table = Table(title="Predicted, of a step", **STYLE)
    table.add_column("")
    table.add_column("what")
    for name in (found.first, found.second, "change"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    section = ""
    for figure in found.figures:
        shown = "" if figure.section == section else figure.section
        values = (_quantity(figure, value) for value in (figure.first, figure.second))
        table.add_row(shown, Text(figure.what), *values, _change(figure))
        section = figure.section
    return table


def _quantity(figure: Figure, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.unit == "samples/s":
        return f"{value:,.4g}"
    return seconds(value) if figure.unit == "s" else size(value)


def _change(figure: Figure) -> str:
    """In percent; a factor where it is large."""
    change = figure.change
    if change is None:
        return "" if figure.first == figure.second else "new" if not figure.first else "gone"
    if change == 0:
        return "="
    if figure.second == 0:
        return "gone"
    return f"{change:+.1%}" if change < 10 else f"x{change + 1:.3g}"


def as_data(found: PlanDifference) -> dict[str, Any]:
    """The same for programs."""
    return {
        "equal": found.same == "the plans are equal",
        "verdict": found.same or "the plans differ",
        "structure": [asdict(row) for row in found.structure],
        "figures": [asdict(figure) | {"change": figure.change} for figure in found.figures],
    }
