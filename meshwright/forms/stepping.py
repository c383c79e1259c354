"""What steps parameters of a plan, seen beside their shapes: which an optimizer cannot step where
the plan has them, and how evenly owners share them out."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.flat import chunk_rows
from meshwright.forms.folding import folded_groups
from meshwright.forms.sync import exchange_of, wrong_parameters
from meshwright.forms.tables import splits_of
from meshwright.forms.updates import Reach, Update, is_known, spoken, update
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Kind, Tensor
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.summed import summed_axes
from meshwright.ir.text.plain_text import SHOWN


def check_updates(plan: Plan, graph: Graph) -> None:
    """PlanError with the first error that `update_findings` has."""
    for finding in update_findings(plan, graph):
        raise PlanError(str(finding))


def owner_notes(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Yields how parameters that have owners are shared out."""
    for index, stage in enumerate(plan.stages):
        trained = _trained(plan, graph, index)
        sums = summed_axes(plan, graph, index)
        for view, name, paths in folded_groups(stage, trained, sums):
            if view.dp == 1 or not exchange_of(view).owns_whole or not paths:
                continue
            shapes = tuple(Shaped(tuple(trained[p].shape), trained[p].nbytes) for p in paths)
            exchange, ranks = exchange_of(view, shapes), view.mesh.get("dp_shard", 1)
            yield Finding(
                "sync",
                f"stage {index}: {view.sync_form} has {len(paths)} parameters stepped whole by "
                f"{spoken(name or plan.optimizer)}, each by one of {ranks} owners: the one with "
                f"most to do has {exchange.busiest:.1%} of the work, where {1 / ranks:.1%} is "
                f"even, and one rank has {exchange.largest:.1%} of their state at most",
                severity="note",
            )


def _trained(plan: Plan, graph: Graph, stage: int) -> dict[str, Tensor]:
    """Parameters of a stage that have gradients, by path."""
    names = [name for block in plan.stage_blocks(graph, stage) for name in block.params]
    tensors = [graph.tensors[name] for name in names]
    return {x.fqn: x for x in tensors if x.requires_grad and x.kind is Kind.PARAMETER}


def update_findings(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Yields the first parameter of each stage and group that cannot be stepped as the plan says,
    with what can be."""
    for index, stage in enumerate(plan.stages):
        trained = _trained(plan, graph, index)
        sums = summed_axes(plan, graph, index)
        for group in folded_groups(stage, trained, sums):
            name = group.update or plan.optimizer
            for message, near in wrong_parameters(plan, graph, index, group.stage, group.paths):
                yield Finding("sync", f"stage {index}: {message}", near)
            if not is_known(name):
                continue
            form = update(name)
            for path in group.paths:
                shape = tuple(trained[path].shape)
                if not form.takes(shape):
                    dims = " or ".join(map(str, form.dims))
                    yield Finding(
                        "by_parameter",
                        f"stage {index}: {name} steps parameters of {dims} dims, and "
                        f"{path[:SHOWN]} has shape {list(shape)}",
                        f"update adamw for it, or update {name} by patterns that name no others",
                    )
                    break
                if form.reach is Reach.ELEMENT:
                    continue
                if form.reach is Reach.BLOCK and not _on_blocks(form, group.stage, shape):
                    yield Finding(
                        "optimizer",
                        f"stage {index}: {spoken(name)} steps elements in blocks of {form.block}, "
                        f"and rows of {path[:SHOWN]}, of shape {list(shape)}, on dp_shard="
                        f"{group.stage.mesh['dp_shard']} ranks end within one, or are less than "
                        f"{form.least} elements",
                        "zero 0, or another dp_shard",
                    )
                    break
                split = [a for a in splits_of(plan, graph, index, path)
                         if dict(stage.model).get(a, 1) > 1]  # fmt: skip
                if split:
                    yield Finding(
                        "by_parameter",
                        f"stage {index}: a step of {spoken(name)} depends on {form.reach.value}, "
                        f"and {path[:SHOWN]} is split over {split[0]}",
                        f"{split[0]} 1, or update adamw for it",
                    )
                    break


def _on_blocks(form: Update, stage: Stage, shape: tuple[int, ...]) -> bool:
    """Whether ranks of a stage step whole blocks of a parameter."""
    exchange = exchange_of(stage)
    if not exchange.is_split("optimizer") or exchange.owns_whole:
        return True
    return cut_on_blocks(form, shape, stage.mesh.get("dp_shard", 1))


def cut_on_blocks(form: Update, shape: tuple[int, ...], ranks: int) -> bool:
    """Tells whether so many ranks, who have some rows each, step a parameter as one that has all
    does, if the optimizer looks at blocks."""
    borders = row_borders(shape, ranks)
    if borders[-1] < form.least or len(borders) == 2:
        return True
    return not any(border % form.block for border in borders) and all(
        last - first >= form.least for first, last in pairwise(borders)
    )


def row_borders(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Returns the first element of each rank's rows of a parameter, row-major, and its end."""
    rows, row = (shape[0] if shape else 1), prod(shape[1:])
    firsts = [chunk_rows(rows, ranks, index)[0] * row for index in range(ranks)]
    return tuple(dict.fromkeys([*firsts, rows * row]))
