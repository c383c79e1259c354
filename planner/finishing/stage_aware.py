"""Forms that say of how many layers of each stage another form is said, where stages recompute all
of their layers (`planner.problem.by_stage`)."""

from collections.abc import Iterator

from meshwright.forms.retention import retention
from meshwright.forms.retention import shared_out as forms
from meshwright.ir.plan.plan import Plan
from meshwright.planner.decisions.recompute import modes
from meshwright.planner.decisions.saved import asked as asked_saved
from meshwright.planner.pins.constraints import is_scoped, pinned
from meshwright.planner.problem.by_stage import layers, shared_out
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """With as little recomputed as fits; the last of each form is the best of it."""
    if len(plan.schedule.rows) < 2 or len(plan.schedule.rows) < len(plan.stages):
        return
    if not any(stage.recompute for stage in plan.stages) or asked_saved(problem.constraints):
        return
    if is_scoped(problem.constraints):
        return
    pin = pinned(problem.constraints, "recompute")
    for name in forms():
        # One that is not exact, and others than the one that is asked for, are for the user to say.
        free = len(modes(problem.constraints)) == 2 and retention(name).exact
        if pin == name or free:
            yield from _shared_out(problem, plan, name)


def _shared_out(problem: Problem, plan: Plan, name: str) -> Iterator[Plan]:
    count = len(layers(plan, problem.graph, 0))
    least, most = 0, count  # recomputed in stage 0: too few, or just enough
    while most - least > 1:
        middle = (least + most) // 2
        stages = shared_out(plan, problem.graph, name, middle / count)
        made = changed(problem, plan, stages=stages)
        if excess_bytes(problem, made):
            least = middle
        else:
            most = middle
            yield made
