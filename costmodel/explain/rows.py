"""What it would cost if gradients of tables went whole, where a plan sends their rows alone."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate
from meshwright.forms.sync import for_tables
from meshwright.ir.graph.graph import Kind
from meshwright.ir.plan.detail import RowsSaved
from meshwright.ir.plan.parameters import as_for, choice_of
from meshwright.ir.plan.plan import ParameterChoice, Plan, Stage
from meshwright.ir.plan.predicted import Prediction

_ALL, _EACH = "rows", "rows_each"
"""Settings of forms: the share of rows that all samples read, and that one rank's do."""


def rows_saved(tables: CostTables, plan: Plan, own: Prediction) -> RowsSaved | None:
    """Returns what a plan saves by rows, whose prediction is `own`; None if it sends all whole."""
    found = {key: one for key, one in _sparse(tables, plan)}
    if not found:
        return None
    whole, _ = estimate(tables.graph, tables.cluster, _whole(plan), tables)
    rows = sum(count for count, _, _ in found.values())
    read = sum(count * share for count, share, _ in found.values())
    kinds = {each for _, _, each in found.values()}
    return RowsSaved(
        tables=tuple(path for path, _ in found),
        forms=tuple(dict.fromkeys(form for _, form in found)),
        share=float(f"{read / rows:.4g}"),
        of="" if len(kinds) > 1 else "a rank" if kinds == {True} else "all ranks",
        whole_step_s=float(f"{whole.step_s:.6g}"),
        whole_wait_s=float(f"{max(0.0, _waited_s(whole) - _waited_s(own)):.6g}"),
    )


def _waited_s(found: Prediction) -> float:
    """Seconds of a step that nothing hides of what replicas send."""
    assert found.breakdown
    return found.breakdown.gradients_s + found.breakdown.gather_s


def _sparse(
    tables: CostTables, plan: Plan
) -> Iterator[tuple[tuple[str, str], tuple[int, float, bool]]]:
    """(path, form) of tables that send rows alone, and: how many they have, the share that is read,
    whether that is one rank's."""
    graph = tables.graph
    for index, stage in enumerate(plan.stages):
        if stage.dp == 1 or not any(map(_sends_rows, stage.by_parameter.values())):
            continue
        names = dict.fromkeys(n for b in plan.stage_blocks(graph, index) for n in b.params)
        for tensor in [graph.tensors[name] for name in names]:
            choice = choice_of(stage.by_parameter, tensor.fqn)
            if tensor.kind is Kind.PARAMETER and choice and _sends_rows(choice):
                assert choice.sync
                each = _EACH in choice.sync.settings
                share = choice.sync.settings.get(_EACH if each else _ALL, 1.0)
                yield (tensor.fqn, choice.sync.form), (tensor.shape[0], float(share), each)


def _sends_rows(choice: ParameterChoice) -> bool:
    return choice.sync is not None and choice.sync.form in for_tables()


def _whole(plan: Plan) -> Plan:
    """The plan in which such tables are treated as the rest of their stage."""

    def usual(stage: Stage) -> Stage:
        rest = as_for(stage, None)
        said = {
            pattern: ParameterChoice(
                zero=rest.zero, sync=rest.sync, store=rest.store, update=choice.update
            )
            if _sends_rows(choice)
            else choice
            for pattern, choice in stage.by_parameter.items()
        }
        return replace(stage, by_parameter=said)

    return replace(plan, stages=tuple(map(usual, plan.stages)))
