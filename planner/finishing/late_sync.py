"""Other forms of synchronisation (`Stage.sync`) with settings that are predicted to pay.

Only where a pin asks for a form: beside fused kernels and on GPUs they have not been proven.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.forms.sync import chosen, offers, suits
from meshwright.ir.plan.plan import Plan, Stage, SyncChoice
from meshwright.planner.pins.constraints import Pin, allowed
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Each form that pins leave, with each choice of settings that its file offers, in all stages
    that it suits at once."""
    asked = any(isinstance(c, Pin) and c.name == "sync" for c in problem.constraints)
    if not asked or all(stage.dp == 1 for stage in plan.stages):
        return
    for key in allowed(problem.constraints, "sync", chosen()):
        for choice in offers(key):
            stages = tuple(_with(stage, choice) for stage in plan.stages)
            if stages != plan.stages:
                yield changed(problem, plan, stages=stages)


def _with(stage: Stage, choice: SyncChoice) -> Stage:
    return replace(stage, sync=choice) if _takes(stage, choice.form) else stage


def _takes(stage: Stage, form: str) -> bool:
    return stage.dp > 1 and suits(form, stage.zero)
