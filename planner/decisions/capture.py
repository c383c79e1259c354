"""Whether what blocks launch is recorded in CUDA graphs, and replayed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.forms.captured import OF_GPUS, RULE, capture_findings, ops_against
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import (
    Schedule,
    halves_backwards,
    says_when_to_recompute,
)
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Constraint, Pin, Value
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
    has measured are known as they run one by one, and those of other stacks as they are there, so
    with these nothing is tried."""
    if all(stage.capture for stage in plan.stages) or _is_measured(problem):
        return
    if problem.tables.style:
        return
    if not allowed(problem.constraints, RULE, (_YES,)):
        return
    if next(capture_findings(_recorded(plan), problem.graph), None) is None:
        yield changed(problem, plan, stages=_recorded(plan).stages)


def _recorded(plan: Plan) -> Plan:
    return replace(plan, stages=tuple([replace(stage, capture=True) for stage in plan.stages]))


def _resolve(pin: Pin, cluster: Cluster | None) -> Constraint:
    """PlanError on CPUs."""
    devices = cluster.device_types if cluster else ()
    if pin.value == _YES and any(device.kind == "cpu" for device in devices):
        raise PlanError(f"constraint {pin}: {OF_GPUS}; nearest is {RULE}={_NO}")
    return pin


def _refused(problem: Problem, pin: Pin) -> str:
    """By an op of the model."""
    if pin.value != _YES:
        return ""
    return next(filter(None, ops_against(problem.graph).values()), "")


def _is_measured(problem: Problem) -> bool:
    profile = problem.tables.profile
    return profile is not None and bool(profile.blocks)


def _notes(problem: Problem, plan: Plan) -> Iterator[str]:
    """What is not known of recorded blocks; and what forbids them, for who asked."""
    if any(stage.capture for stage in plan.stages):
        yield (
            "blocks are launched as CUDA graphs, priced by NVIDIA's figures of their launches; no "
            "GPU has run ours, and capture=false does without"
        )


DECISION = Decision(
    words=(_NO, _YES),
    scope="plan",
    read=lambda plan, stage: _YES if stage.capture else _NO,
    apply=_apply,
    resolve=_resolve,
    variants=_variants,
    refused=_refused,
    notes=_notes,
    place=9,
    words_of=lambda plan: ["graphs"] * any(stage.capture for stage in plan.stages),
    show=lambda stage: "yes" if stage.capture else "-",
)
