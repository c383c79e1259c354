"""Blocks as torch.compile makes them (`Stage.compile`), where a profile says what they take."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import halves_backwards
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.compiled import measured_compiled
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with all stages compiled, if pins leave it and nothing in it forbids it."""
    if all(stage.compile for stage in plan.stages) or problem.tables.profile is None:
        return
    if not allowed(problem.constraints, "compile", ("true",)):
        return
    if halves_backwards(problem.tables.schedule(plan.schedule)):
        return
    if not any(any(s.saved.values()) for s in plan.stages) and measured_compiled(problem, plan):
        stages = tuple(replace(stage, compile=True) for stage in plan.stages)
        yield changed(problem, plan, stages=stages)
