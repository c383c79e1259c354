"""Whether torch.compile makes kernels of what blocks do between collectives."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import Schedule, halves_backwards
from meshwright.planner.pins.constraints import allowed, pinned
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Pin, Value
from meshwright.planner.problem.compiled import measured_compiled
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed

_YES, _NO = "true", "false"


def _together(pin: Pin, pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
    """What ops of compiled blocks keep is torch.compile's to say."""
    if pin.value != _YES:
        return ()
    kept = Pin("saved", "none")
    for other in pins:
        if other.name == kept.name and other != kept:
            raise PlanError(
                f"constraints {pin} and {other}: what single ops of compiled blocks keep is "
                "torch.compile's to say; nearest is recompute=full"
            )
    return (kept,)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where backwards are whole."""
    whole = not halves_backwards(table()) and not table().pairs
    return replace(stage, compile=value == _YES and whole)


def _variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with all stages compiled, where a profile says what they take and nothing in the
    plan forbids it."""
    if all(stage.compile for stage in plan.stages) or problem.tables.profile is None:
        return
    if not allowed(problem.constraints, "compile", (_YES,)):
        return
    schedule = problem.tables.schedule(plan.schedule)
    if halves_backwards(schedule) or schedule.pairs:
        return
    if not any(any(s.saved.values()) for s in plan.stages) and measured_compiled(problem, plan):
        stages = tuple(replace(stage, compile=True) for stage in plan.stages)
        yield changed(problem, plan, stages=stages)


def _notes(problem: Problem, plan: Plan) -> Iterator[str]:
    """Why blocks are not compiled, or what is not known of those that are."""
    known = measured_compiled(problem, plan)
    said = "`meshwright profile --compile` measures them"
    if any(stage.compile for stage in plan.stages) and not known:
        yield f"compiled blocks are predicted as others are: nobody has measured them; {said}"
    elif problem.tables.profile and problem.tables.profile.blocks and not known:
        if pinned(problem.constraints, "compile") is None:
            yield f"torch.compile is not tried: the profile has no compiled blocks; {said}"


DECISION = Decision(
    words=(_NO, _YES),
    scope="plan",
    read=lambda plan, stage: _YES if stage.compile else _NO,
    together=_together,
    apply=_apply,
    variants=_variants,
    notes=_notes,
    place=8,
    words_of=lambda plan: ["compile"] * any(stage.compile for stage in plan.stages),
    show=lambda stage: "yes" if stage.compile else "-",
)
