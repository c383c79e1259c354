"""Parameters that single ranks own, where the optimizer looks at whole ones: each is stepped once,
and not by every replica."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from meshwright.forms.copied import loses_copies
from meshwright.forms.stepping import update_findings
from meshwright.forms.sync import has_owners, suits
from meshwright.forms.sync_findings import of_stage
from meshwright.forms.updates import Reach, update
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Stage, Zero
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed

_LEVELS: tuple[Zero, ...] = (1, 2, 3)
"""What of those parameters is at owners only."""


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with each form that has owners, and each level that goes with it, for all parameters
    of which the plan says that they are stepped whole, and not how replicas agree on them."""
    for form in has_owners():
        for zero in _LEVELS:
            if not suits(form, zero):
                continue
            own = ParameterChoice(zero=zero, sync=FormChoice(form=form))
            stages = tuple(_with(plan, stage, own) for stage in plan.stages)
            made = replace(plan, stages=stages, predicted=None)
            if stages == plan.stages or loses_copies(made):
                continue
            if broken(problem.constraints, made, problem.graph):
                continue
            if not any(update_findings(made, problem.graph)):
                yield changed(problem, plan, stages=stages)


def _with(plan: Plan, stage: Stage, own: ParameterChoice) -> Stage:
    """A stage whose parameters that are stepped whole have owners; replicas that hold all may share
    them out."""
    if stage.dp == 1:
        return stage
    said = {
        pattern: replace(own, update=choice.update)
        for pattern, choice in stage.by_parameter.items()
        if choice.sync is None and choice.store is None
        and update(choice.update or plan.optimizer).reach is Reach.PARAMETER
    }  # fmt: skip
    shard = stage.mesh.get("dp_shard", 1)
    shared = {
        **stage.mesh, "dp_replicate": 1,
        "dp_shard": prod([stage.mesh.get("dp_replicate", 1), shard]),
    }  # fmt: skip
    for tried in (stage, replace(stage, mesh=shared)) if shard == 1 else (stage,):
        if said and not any(
            found
            for choice in said.values()
            for found in of_stage(as_for(tried, choice), choice.update or plan.optimizer)
        ):
            return replace(tried, by_parameter={**stage.by_parameter, **said})
    return stage
