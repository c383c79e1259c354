"""What steps parameters of a plan, seen beside their shapes: which an optimizer cannot step where
the plan has them, and how evenly owners share them out."""

from collections.abc import Iterator

from meshwright.forms.exchange import Shaped
from meshwright.forms.sync import exchange_of, wrong_parameters
from meshwright.forms.tables import splits_of
from meshwright.forms.updates import UPDATES, Reach, update
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Kind, Tensor
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.parameters import groups_of
from meshwright.ir.plan.plan import Plan
from meshwright.ir.text.plain_text import SHOWN


def check_updates(plan: Plan, graph: Graph) -> None:
    """PlanError with the first error that `update_findings` has."""
    for finding in update_findings(plan, graph):
        raise PlanError(str(finding))


def owner_notes(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Yields how parameters that have owners are shared out."""
    for index, stage in enumerate(plan.stages):
        trained = _trained(plan, graph, index)
        for view, name, paths in groups_of(stage, trained):
            if view.dp == 1 or not exchange_of(view).owns_whole or not paths:
                continue
            shapes = tuple(Shaped(tuple(trained[p].shape), trained[p].nbytes) for p in paths)
            exchange, ranks = exchange_of(view, shapes), view.mesh.get("dp_shard", 1)
            yield Finding(
                "sync",
                f"stage {index}: {view.sync_form} has {len(paths)} parameters stepped whole by "
                f"{name or plan.optimizer}, each by one of {ranks} owners: the one with most to do "
                f"has {exchange.busiest:.1%} of the work, where {1 / ranks:.1%} is even, and one "
                f"rank has {exchange.largest:.1%} of their state at most",
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
        for group in groups_of(stage, trained):
            name = group.update or plan.optimizer
            for message, near in wrong_parameters(plan, graph, index, group.stage, group.paths):
                yield Finding("sync", f"stage {index}: {message}", near)
            if name not in UPDATES:
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
                split = [a for a in splits_of(plan, graph, index, path)
                         if dict(stage.model).get(a, 1) > 1]  # fmt: skip
                if split:
                    yield Finding(
                        "by_parameter",
                        f"stage {index}: a step of {name} depends on {form.reach.value}, and "
                        f"{path[:SHOWN]} is split over {split[0]}",
                        f"{split[0]} 1, or update adamw for it",
                    )
                    break
