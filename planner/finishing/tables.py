"""Embedding tables of which few rows occur: by forms that send those alone, where `rows` says how
many there are."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.forms.sync import for_tables, of_stage
from meshwright.ir.graph.tables import EmbeddingTable, tables_of
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting, Stage
from meshwright.planner.pins.parameter_pins import paths_of
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with one table after another, the largest first, in the form that gains most, as
    long as that gains anything."""
    if problem.rows is None:
        return
    best = plan
    for table in tables_of(problem.graph):
        distinct = problem.rows.distinct(table.path, table.rows, table.lookups)
        if distinct is None:
            continue
        for form in for_tables():
            share = min(1.0, max(distinct / table.rows, 1e-9))
            settings: dict[str, Setting] = {
                "rows": float(f"{share:.4g}"),
                "row_bytes": table.row_bytes,
            }
            choice = ParameterChoice(sync=FormChoice(form=form, settings=settings))
            stages = tuple(
                _with(problem, plan, index, stage, table, choice)
                for index, stage in enumerate(best.stages)
            )
            if stages == best.stages:
                continue
            found = changed(problem, best, stages=stages)
            yield found
            assert found.predicted and best.predicted
            if found.predicted.step_s < best.predicted.step_s:
                best = found


def _with(
    problem: Problem,
    plan: Plan,
    index: int,
    stage: Stage,
    table: EmbeddingTable,
    choice: ParameterChoice,
) -> Stage:
    """A stage with the choice for a table that it has, if nothing else is said of that."""
    blocks = plan.stage_blocks(problem.graph, index)
    if stage.dp == 1 or table.path not in paths_of(problem.graph, blocks):
        return stage
    if table.path in stage.by_parameter and stage.by_parameter[table.path].sync is None:
        return stage
    if any(of_stage(as_for(stage, choice), plan.optimizer)):
        return stage
    return replace(stage, by_parameter={**stage.by_parameter, table.path: choice})
