"""Whether what blocks launch is recorded in CUDA graphs, and replayed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.forms.captured import RULE, capture_findings, may_capture
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import (
    Schedule,
    halves_backwards,
    says_when_to_recompute,
)
from meshwright.planner.pins.constraints import allowed, pinned
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Value
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed

_NO, _YES = "false", "true"


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    """Where forwards and backwards are one run each."""
    if value != _YES:
        return replace(stage, capture=False)
    schedule = table()
    whole = not halves_backwards(schedule) and not says_when_to_recompute(schedule)
    return replace(stage, capture=whole)


def _variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with all stages recorded, where nothing in it forbids that. Blocks that a profile
    has measured are known as they run one by one, so there nothing is tried."""
    if all(stage.capture for stage in plan.stages) or _is_measured(problem):
        return
    if not allowed(problem.constraints, RULE, (_YES,)):
        return
    recorded = replace(
        plan, stages=tuple(replace(stage, capture=True) for stage in plan.stages)
    )
    if may_capture(recorded, problem.graph):
        yield changed(problem, plan, stages=recorded.stages)


def _is_measured(problem: Problem) -> bool:
    profile = problem.tables.profile
    return profile is not None and bool(profile.blocks)


def _notes(problem: Problem, plan: Plan) -> Iterator[str]:
    """What is not known of recorded blocks; and what forbids them, for who asked."""
    if any(stage.capture for stage in plan.stages):
        yield (
            "CUDA graphs are priced by their launches alone (NVIDIA's figures): nobody has measured "
            "them here"
        )
    elif pinned(problem.constraints, RULE) == _YES:
        wanted = replace(plan, stages=tuple(replace(s, capture=True) for s in plan.stages))
        for finding in capture_findings(wanted, problem.graph):
            yield f"blocks are not recorded: {finding.message}"
            return


DECISION = Decision(
    words=(_NO, _YES),
    scope="plan",
    read=lambda plan, stage: _YES if stage.capture else _NO,
    apply=_apply,
    variants=_variants,
    notes=_notes,
    place=9,
    words_of=lambda plan: ["graphs"] * any(stage.capture for stage in plan.stages),
    show=lambda stage: "yes" if stage.capture else "-",
)
