"""Embedding tables that do not fit: on the host, with as many rows on the device as there is room
for, shared out among tables by what their caches would miss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import cast

from meshwright.forms.cache.curves import MissCurve, shared_out
from meshwright.forms.copied import loses_copies
from meshwright.forms.storage import facts_of_store, of_tables
from meshwright.forms.sync import chosen, facts_of_tables, takes_rows, zero_of_tables
from meshwright.forms.sync_findings import of_stage
from meshwright.forms.tables import table_findings
from meshwright.forms.updates import update
from meshwright.ir.graph.tables import EmbeddingTable, tables_of
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting, Stage, Zero
from meshwright.planner.finishing.tables import facts_of
from meshwright.planner.pins.cache_pins import TablesCached
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.pins.parameter_pins import paths_of
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed

HALVINGS = 8
AT_ONCE = 2.25
"""Batches whose rows have slots at least: that which is trained on, the next one, and what differs
from the mean."""


@dataclass(frozen=True)
class _CountedTable:
    """A table of which it is known how often rows occur."""

    table: EmbeddingTable
    curve: MissCurve


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan, if it does not fit, with caches for all tables that may have one: the largest that
    fit, which miss least. Replicas share the rows of a table out, else copies of those that do keep
    a cache each, where a pin asks for copies or nothing else may be. And the plan with what is
    known of the rows of tables of which a pin says how large their caches are."""
    known = {one.table.path: one for one in _known(problem)}
    stages = tuple(_counted(problem, plan, index, known) for index in range(len(plan.stages)))
    if stages != plan.stages:
        plan = changed(problem, plan, stages=stages)
        yield plan
    apart = any(device.is_apart for device in problem.tables.devices.values())
    if not apart or not excess_bytes(problem, plan):
        return
    if not update(plan.optimizer).rests_by_default:  # all rows would be stepped, on the host
        return
    for store in of_tables() if known else ():
        for shared in (True, False):
            found = [*_fitting(problem, plan, store, known, shared=shared)]
            yield from found
            if found:
                break


def _known(problem: Problem) -> Iterator[_CountedTable]:
    if problem.rows is None:
        return
    for table in tables_of(problem.graph):
        found = problem.rows.named(table.path, table.rows, table.lookups)
        if found is not None and table.ids:
            yield _CountedTable(table, MissCurve(*found))


def _counted(problem: Problem, plan: Plan, index: int, known: Mapping[str, _CountedTable]) -> Stage:
    """A stage whose pinned caches miss what they miss of rows that were counted."""
    stage = plan.stages[index]
    pinned = [pin for pin in problem.constraints if isinstance(pin, TablesCached)]
    paths = {t.path for pin in pinned for t in pin.tables(problem.graph)} & known.keys()
    said = dict(stage.by_parameter)
    for path in paths & said.keys():
        store, facts = said[path].store, facts_of(problem, plan, index, known[path].table)
        if store is None or store.form not in of_tables() or not facts:
            continue
        slots = round(float(store.settings["ratio"]) * known[path].table.rows)
        own = {"ratio": store.settings["ratio"], **_missing(known[path], slots), **facts}
        told = {name: own.get(name, x) for name, x in store.settings.items()}
        sync = said[path].sync
        if sync is not None:
            new = {name: facts.get(name, x) for name, x in sync.settings.items()}
            sync = replace(sync, settings=new)
        said[path] = replace(said[path], store=replace(store, settings=told), sync=sync)
    return replace(stage, by_parameter=said) if said != stage.by_parameter else stage


def _missing(known: _CountedTable, slots: int) -> dict[str, Setting]:
    """Of a batch, the share of rows that are in none of so many slots, by its setting."""
    share = known.curve.missing(slots) / known.table.rows
    return {"missing": min(1.0, max(1e-9, float(f"{share:.4g}")))}


def _fitting(
    problem: Problem, plan: Plan, store: str, known: Mapping[str, _CountedTable], *, shared: bool
) -> Iterator[Plan]:
    """By halves, until the largest caches that fit are known well; `shared`: as of `_with`."""
    sizes = {path: float(one.table.row_bytes) for path, one in known.items()}
    least = {path: ceil(AT_ONCE * one.curve.read()) for path, one in known.items()}
    curves = {path: one.curve for path, one in known.items()}
    low = sum(min(least[path], curves[path].rows) * sizes[path] for path in known)
    high = sum(curves[path].rows * sizes[path] for path in known)
    facts = {
        (index, path): facts_of(problem, plan, index, one.table)
        for index in range(len(plan.stages)) for path, one in known.items()
    }  # fmt: skip
    budget = low
    for _ in range(HALVINGS):
        slots = shared_out(curves, sizes, least, budget)
        stages = tuple(
            _with(problem, plan, index, stage, store, known, slots, facts, shared=shared)
            for index, stage in enumerate(plan.stages)
        )
        made = replace(plan, stages=stages, predicted=None)
        if stages == plan.stages or loses_copies(made):
            return
        if any(table_findings(made, problem.graph)):
            return
        if broken(problem.constraints, made, problem.graph):
            return
        found = changed(problem, plan, stages=stages)
        if excess_bytes(problem, found):
            high = budget
        else:
            low = budget
            yield found
        if budget == low == high or (budget == high and high < low):
            return
        budget = (low + high) / 2


def _with(
    problem: Problem,
    plan: Plan,
    index: int,
    stage: Stage,
    store: str,
    known: Mapping[str, _CountedTable],
    slots: Mapping[str, int],
    facts: Mapping[tuple[int, str], Mapping[str, Setting]],
    *,
    shared: bool,
) -> Stage:
    """A stage whose tables have caches; `shared`: all replicas share rows out."""
    mesh = {**stage.mesh, "dp_replicate": 1, "dp_shard": stage.dp} if shared else stage.mesh
    tried = stage if stage.dp == 1 else replace(stage, mesh=mesh)
    paths = paths_of(problem.graph, plan.stage_blocks(problem.graph, index))
    for path in (path for path in known if path in paths and path not in stage.by_parameter):
        choice = _choice(tried, store, known[path], slots[path], facts[index, path])
        if choice is not None and not any(of_stage(as_for(tried, choice), plan.optimizer)):
            tried = replace(tried, by_parameter={**tried.by_parameter, path: choice})
    return tried if tried.by_parameter != stage.by_parameter else stage


def _choice(
    stage: Stage, store: str, known: _CountedTable, slots: int, facts: Mapping[str, Setting]
) -> ParameterChoice | None:
    """What is said of a table; None if a fact is missing."""
    if not facts:
        return None
    ratio = min(1.0, slots / known.table.rows)
    own: dict[str, Setting] = {**facts, "ratio": ratio, **_missing(known, slots)}
    told = FormChoice(form=store, settings={name: own[name] for name in facts_of_store(store)})
    if stage.dp == 1:
        return ParameterChoice(store=told)
    for form in chosen():
        wanted = facts_of_tables(form)
        if takes_rows(form) and all(facts.get(name) for name in wanted):
            sync = FormChoice(form=form, settings={name: facts[name] for name in wanted})
            return ParameterChoice(zero=cast(Zero, zero_of_tables(form)), sync=sync, store=told)
    return None
