"""Embedding tables in plans: which forms have only the rows that an input names, and where that is
wrong."""

from collections.abc import Iterator, Mapping

from meshwright.forms.rows import torn_rows
from meshwright.forms.storage import keeps_rows, without_parameters
from meshwright.forms.sync import (
    exchange_of,
    facts_of_tables,
    ids_of,
    is_exact,
    reads_some_rows,
)
from meshwright.forms.updates import UPDATES, Reach, update
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.tables import LOOKUPS, tables_of
from meshwright.ir.layout.layout import Shard, parse_placement, parse_strategy
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.parameters import as_for, stage_for, views_of
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage, param_key
from meshwright.ir.plan.summed import summed_axes
from meshwright.ir.text.plain_text import SHOWN


def table_findings(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Yields the parameters of which a form has only the rows that an input names, and of which the
    model reads others, or other replicas' samples: it would compute with old values; and those
    whose rows it would have to have whole, and model axes split."""
    tables = {table.path: table.ids for table in tables_of(graph)}
    for index, stage in enumerate(plan.stages):
        if not any(reads_some_rows(view) for view in views_of(stage)):
            continue
        names = [name for block in plan.stage_blocks(graph, index) for name in block.params]
        sums = summed_axes(plan, graph, index)
        frozen = {graph.tensors[n].fqn for n in names if not graph.tensors[n].requires_grad}
        for path in dict.fromkeys(graph.tensors[name].fqn for name in names):
            view, ids = stage_for(stage, path), tables.get(path, "")
            for form, told in ids_of(view).items():
                key = "sync" if form == view.sync_form else "store"
                if path in frozen:
                    has = f"stage {index}: {form} has rows that are trained, and {path} is frozen"
                    stores = f"store {' or '.join(without_parameters())}, or none, for {path}"
                    yield Finding(key, has, stores if key == "store" else f"no sync for {path}")
                elif told != ids or not ids:
                    rows = f"input {told[:SHOWN]!r}" if told else "an input"
                    message = f"stage {index}: {form} has the rows of {path} that {rows} names, "
                    near = f"no {key} for {path}, which is read otherwise too"
                    yield Finding(
                        key, f"{message}and others are read", f"ids {ids!r}" if ids else near
                    )
                elif 0 in splits_of(plan, graph, index, path).values():
                    yield torn_rows(form, path)
                elif key == "store" and (axes := sums.get(path)):
                    over = ", ".join(sorted(axes))
                    message = (
                        f"stage {index}: gradients of {path} are summed over {over}, of which "
                    )
                    near = f"no model axis, or no store for {path}"
                    yield Finding(key, f"{message}which store {form} knows nothing", near)
                elif view.dp > 1 and _gathers_ids(plan, graph, index, path, ids):
                    message = f"stage {index}: a layout gathers ids of all replicas to look up "
                    has = f"{path}, and {form} has the rows of a replica's own"
                    yield Finding(
                        key, message + has, f"a layout that splits them, or no {key} for {path}"
                    )


def stepping_notes(plan: Plan) -> Iterator[Finding]:
    """Yields how the rows of tables are stepped that have a form of their own: those without a
    gradient, too, whatever state they have, unless that changes nothing."""
    for index, stage in enumerate(plan.stages):
        for path, choice in stage.by_parameter.items():
            view = as_for(stage, choice)
            yield from _useless(index, path, view, choice.update or plan.optimizer)
            known = view.sync is not None and facts_of_tables(view.sync_form)
            if stage.dp == 1 or not (known and is_exact(view.sync_form)):
                continue
            apart = exchange_of(view).is_split("optimizer")
            who = "the owner of a row" if apart else "every replica"
            step = choice.update or plan.optimizer
            alone = f", which looks at {Reach.ELEMENT.value}" * apart
            rests = step in UPDATES and update(step).rests_by_default
            some = bool(exchange_of(view, rests=rests).stepped)
            when = "where it has a gradient" if some else "with a gradient or without"
            why = ", and what has none stays as it is" * some
            yield Finding(
                "sync",
                f"stage {index}: {view.sync_form} is exact for {path[:SHOWN]}: {who} steps it in "
                f"each step, {when}, by {step}{alone}{why}",
                severity="note",
            )


def _useless(index: int, path: str, view: Stage, step: str) -> Iterator[Finding]:
    """A cache of a table all of whose rows are stepped."""
    rest = [name for name in UPDATES if update(name).rests_by_default]
    kept = view.store is not None and keeps_rows(view.store.form)
    if kept and view.store and not (step in UPDATES and update(step).rests_by_default):
        yield Finding(
            "store",
            f"stage {index}: {step} changes rows of {path[:SHOWN]} that no batch reads: all are "
            f"stepped on the host, and none stay with {view.store.form}",
            f"update {' or '.join(rest)} for it, or no store for {path[:SHOWN]}",
            severity="note",
        )


def splits_of(plan: Plan, graph: Graph, stage: int, path: str) -> Mapping[str, int]:
    """Returns the model axes over which a stage splits a parameter, and the dim that each does."""
    found: dict[str, int] = {}
    for block in plan.stage_blocks(graph, stage):
        if path not in [graph.tensors[name].fqn for name in block.params]:
            continue
        layout = _layout(plan, stage, block.pattern)
        said = layout.parameters.get(param_key(block, path), {}) if layout else {}
        for axis, text in said.items():
            placement = parse_placement(text)
            if axis != "dp" and isinstance(placement, Shard):
                found[axis] = placement.dim
    return found


def _gathers_ids(plan: Plan, graph: Graph, stage: int, path: str, ids: str) -> bool:
    """Whether a replica looks up what samples of others name."""
    if dict(zip(graph.input_names, graph.inputs, strict=True))[ids] not in graph.batch_inputs:
        return False  # all replicas are given all ids
    for block in plan.stage_blocks(graph, stage):
        layout = _layout(plan, stage, block.pattern)
        said = layout.ops if layout else {}
        for op in graph.block_ops(block):
            looked = op.target.startswith(LOOKUPS) and graph.tensors[op.inputs[0]].fqn == path
            text = said.get(op.key, {}).get("dp", "") if looked else ""
            if looked and not (text and isinstance(parse_strategy(text).inputs[1], Shard)):
                return True
    return False


def _layout(plan: Plan, stage: int, pattern: str) -> BlockLayout | None:
    """None: all is whole on every rank."""
    name = plan.stages[stage].layouts.get(pattern)
    return None if name is None else plan.layout(name)


def check_tables(plan: Plan, graph: Graph) -> None:
    """PlanError with the first error that `table_findings` has."""
    for finding in table_findings(plan, graph):
        raise PlanError(str(finding))
