"""Embedding tables of which few rows occur: by forms that send those alone, where `rows` says how
many there are."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, prod
from typing import cast

from meshwright.forms.sync import (
    clips,
    facts_of_tables,
    for_tables,
    ladder,
    undone_by_norm,
    zero_of_tables,
)
from meshwright.forms.sync_findings import of_stage
from meshwright.forms.tables import splits_of, table_findings
from meshwright.ir.graph.tables import EmbeddingTable, tables_of
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting, Stage, Zero
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.pins.parameter_pins import paths_of
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with one table after another, the largest first, in the form that gains most, as
    long as that gains anything; forms that are not exact only if they are allowed."""
    best = plan
    for table in tables_of(problem.graph) if problem.rows is not None else ():
        base = best
        for form, own in _tried(problem):
            stages = tuple(
                _with(problem, plan, index, stage, table, form, own)
                for index, stage in enumerate(base.stages)
            )
            if stages == base.stages:
                continue
            if any(table_findings(replace(base, stages=stages), problem.graph)):
                continue  # model axes may split rows that the form takes whole
            found = changed(problem, base, stages=stages)
            yield found
            if broken(problem.constraints, replace(found, predicted=None), problem.graph):
                continue
            assert found.predicted and best.predicted
            if found.predicted.step_s < best.predicted.step_s:
                best = found


def hope_s(problem: Problem, plan: Plan) -> float:
    """Returns what a step would take that need not wait for gradients, nor for what is made of
    them, if rows are known."""
    assert plan.predicted
    told = plan.predicted.breakdown
    if problem.rows is None or told is None or not tables_of(problem.graph):
        return plan.predicted.step_s
    return plan.predicted.step_s - told.gradients_s - told.gather_s


def _tried(problem: Problem) -> Iterator[tuple[str, Mapping[str, Setting]]]:
    """Forms, each with the settings that are no facts."""
    for form in for_tables(problem.allow) if problem.forms else ():
        limited = problem.max_grad_norm and (undone_by_norm(form) or not clips(form))
        for own in () if limited else ladder(form):
            yield form, own


def _with(
    problem: Problem,
    plan: Plan,
    index: int,
    stage: Stage,
    table: EmbeddingTable,
    form: str,
    own: Mapping[str, Setting],
) -> Stage:
    """A stage with a form for a table that it has, if nothing else is said of that; replicas that
    hold all may share rows out instead."""
    blocks = plan.stage_blocks(problem.graph, index)
    facts = facts_of(problem, plan, index, table)
    wanted = facts_of_tables(form)
    if stage.dp == 1 or not all(facts.get(name) for name in wanted):
        return stage
    if table.path in stage.by_parameter or table.path not in paths_of(problem.graph, blocks):
        return stage
    choice = ParameterChoice(
        zero=cast(Zero, zero_of_tables(form)),
        sync=FormChoice(form=form, settings={**own, **{name: facts[name] for name in wanted}}),
    )
    said = {**stage.by_parameter, table.path: choice}
    whole = not stage.is_sharded and not any(c.zero for c in stage.by_parameter.values())
    shared = {**stage.mesh, "dp_replicate": 1, "dp_shard": prod(_data(stage))}
    tries = (stage, replace(stage, mesh=shared)) if whole else (stage,)
    for tried in tries:
        if not any(of_stage(as_for(tried, choice), plan.optimizer)):
            return replace(tried, by_parameter=said)
    return stage


def _data(stage: Stage) -> tuple[int, int]:
    return stage.mesh.get("dp_replicate", 1), stage.mesh.get("dp_shard", 1)


def facts_of(
    problem: Problem, plan: Plan, index: int, table: EmbeddingTable
) -> Mapping[str, Setting]:
    """Returns what is known of a table, by the names of settings; nothing if its rows were not
    counted. Of replicas with unequal shares, the one with most samples reads most rows."""
    assert problem.rows is not None
    stage = plan.stages[index]
    most = max(stage.batch_shares) / sum(stage.batch_shares)
    own = ceil(table.lookups * most)
    shares = [problem.rows.distinct(table.path, table.rows, n) for n in (table.lookups, own)]
    data, shard = _data(stage)
    busiest = problem.rows.busiest(table.path, table.rows, own, shard if shard > 1 else data)
    again = problem.rows.again(table.path, table.rows, own, table.lookups)
    if None in shares or again is None:
        return {}
    every, each = (
        float(f"{min(1.0, max(found / table.rows, 1e-9)):.4g}") for found in shares if found
    )
    splits = splits_of(plan, problem.graph, index, table.path)
    parts = prod([stage.mesh[axis] for axis, dim in splits.items() if dim])
    return {
        "rows": every, "rows_each": each, "row_bytes": ceil(table.row_bytes / parts),
        "busiest": float(f"{busiest:.4g}"), "prior": min(float(f"{again:.4g}"), 0.9999),
        "ids": table.ids,
    }  # fmt: skip
