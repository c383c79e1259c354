"""What a plan's notes say of rows of tables that are assumed, and not counted."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.graph.tables import EmbeddingTable, tables_of
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.show import seconds
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.planner.finishing.tables import facts_of
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import Problem

BAND = 0.2
"""Of an exponent: streams of words and of ratings lie as far from each other (1.02 to 1.25)."""


def row_notes(problem: Problem, plan: Plan) -> Iterator[str]:
    """Yields how far a step may be off if the exponent of an assumed distribution is."""
    rows = problem.rows
    if rows is None or rows.zipf is None:
        return
    tables = [table for table in tables_of(problem.graph) if table.path not in rows.tables]
    low, high = max(BAND / 2, rows.zipf - BAND), rows.zipf + BAND
    each = [_under(problem, plan, tables, replace(rows, zipf=zipf)) for zipf in (low, high)]
    if each[0].stages == plan.stages:
        return
    slow_s, fast_s = (predict_plan(problem, other).step_s for other in each)
    yield (
        f"rows of tables are {rows.source}: from {low:.3g} to {high:.3g} a step takes "
        f"{seconds(slow_s)} to {seconds(fast_s)}; rows that are counted (count_rows) say which"
    )


def _under(problem: Problem, plan: Plan, tables: list[EmbeddingTable], rows: RowCounts) -> Plan:
    """The plan with what its forms are told of tables, as such rows would have it."""
    known = replace(problem, rows=rows)
    stages = [_told(known, plan, index, stage, tables) for index, stage in enumerate(plan.stages)]
    return replace(plan, stages=tuple(stages), predicted=None)


def _told(
    problem: Problem, plan: Plan, index: int, stage: Stage, tables: list[EmbeddingTable]
) -> Stage:
    said = dict(stage.by_parameter)
    for table in tables:
        choice = said.get(table.path)
        if choice is None or choice.sync is None:
            continue
        facts = facts_of(problem, plan, index, table)
        settings = {name: facts.get(name, x) for name, x in choice.sync.settings.items()}
        said[table.path] = replace(choice, sync=replace(choice.sync, settings=settings))
    return replace(stage, by_parameter=said)
