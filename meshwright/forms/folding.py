"""How a stage is for each of its parameters: what the plan says of it, and the axes that are folded
for it (`ir.plan.folded`)."""

from collections.abc import Iterable, Iterator

from meshwright.forms.sync import folds
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.folded import Fold, fold_of, folded, folds_of
from meshwright.ir.plan.lines import Line, stage_lines
from meshwright.ir.plan.parameters import ParameterGroup, groups_of, stage_for, views_of
from meshwright.ir.plan.plan import DATA_AXES, Plan, Stage
from meshwright.ir.plan.summed import Sums, summed_axes


def fold_for(view: Stage, summed: Iterable[str]) -> Fold:
    """Returns the axes that are folded for a parameter with such a gradient; `view`: the stage as
    it is for that (`ir.plan.parameters.as_for`)."""
    return fold_of(view.model, frozenset(summed)) if folds(view) else ()


def folded_groups(stage: Stage, paths: Iterable[str], sums: Sums) -> tuple[ParameterGroup, ...]:
    """Returns the paths in groups of which the stage says the same and for which the same axes are
    folded, with the stage as it is for them. `sums`: of the paths' gradients."""
    found: list[ParameterGroup] = []
    for group in groups_of(stage, paths):
        apart: dict[Fold, list[str]] = {}
        for path in group.paths:
            apart.setdefault(fold_for(group.stage, sums.get(path, ())), []).append(path)
        found += [
            ParameterGroup(folded(group.stage, fold), group.update, tuple(own))
            for fold, own in sorted(apart.items())
        ] or [group]
    return tuple(found)


def stage_of(stage: Stage, path: str, sums: Sums) -> Stage:
    """Returns a stage as it is for one parameter, as if for all; `sums`: of the stage's."""
    view = stage_for(stage, path)
    return folded(view, fold_for(view, sums.get(path, ())))


def folded_views(stage: Stage) -> Iterator[Stage]:
    """Yields the stage as it may be for parameters, each folding of each view."""
    for view in views_of(stage):
        for fold in folds_of(view.model) if folds(view) else ((),):
            yield folded(view, fold)


def views_in(plan: Plan, graph: Graph, index: int) -> tuple[Stage, ...]:
    """Returns a stage as it is for each of its groups of parameters."""
    stage = plan.stages[index]
    if not stage.model and not stage.by_parameter:
        return (stage,)
    names = dict.fromkeys(n for block in plan.stage_blocks(graph, index) for n in block.params)
    paths = dict.fromkeys(graph.tensors[name].fqn for name in names)
    groups = folded_groups(stage, paths, summed_axes(plan, graph, index))
    return tuple([group.stage for group in groups])


def folded_lines(plan: Plan, graph: Graph) -> Iterator[Line]:
    """Yields the lines of a plan's ranks that parameters have along axes that are folded."""
    for index, stage in enumerate(plan.stages):
        for view in views_in(plan, graph, index):
            if view.model != stage.model:
                found = stage_lines(view)
                yield from (line for axis in DATA_AXES for line in found[axis])
