"""Forms of synchronisation that change what is computed, where the user allowed it (`allow`)."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.forms.sync import changes, clips, exchange_of, is_for_stages, ladder
from meshwright.forms.sync_findings import of_stage
from meshwright.ir.plan.plan import FormChoice, Plan, Stage
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed
from meshwright.planner.search.offers import tie


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with each form that is allowed, and its settings from those that change least on,
    until one that gains more than plans vary is followed by one that does not."""
    assert plan.predicted
    for form in allowed(problem.constraints, "sync", problem.forms):
        if changes(form) not in problem.allow or not is_for_stages(form):
            continue
        if problem.max_grad_norm and not clips(form):
            continue
        best_s, gains = plan.predicted.step_s, False
        for settings in ladder(form):
            choice = FormChoice(form=form, settings=dict(settings))
            stages = tuple(_under(stage, choice, plan.optimizer) for stage in plan.stages)
            if not any(stage.sync == choice for stage in stages):
                break
            found = changed(problem, plan, stages=stages)
            yield found
            assert found.predicted
            if found.predicted.step_s <= best_s * (1 - tie(problem)):
                best_s, gains = found.predicted.step_s, True
            elif gains:  # the first may change little and gain nothing
                break


def _under(stage: Stage, choice: FormChoice, optimizer: str) -> Stage:
    """A stage with the form, if it goes with it; replicas that share what only the optimizer holds
    may hold all of it instead."""
    own = replace(stage, sync=choice)
    split = {"dp_replicate": stage.mesh.get("dp_replicate", 1), "dp_shard": 1}
    split["dp_replicate"] *= stage.mesh.get("dp_shard", 1)
    whole = replace(own, zero=0, mesh={**stage.mesh, **split})
    same = not exchange_of(stage).is_split("gradients")
    tries = (own, whole) if same else (own,)
    for tried in tries:
        if stage.dp > 1 and not any(of_stage(tried, optimizer)):
            return tried
    return stage
