"""The prediction of a plan, and whether it fits."""

from dataclasses import replace

from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.explain.detail import detail_of
from meshwright.forms.captured import recorded_where_legal
from meshwright.forms.sync import given_up
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction
from meshwright.planner.across.mixed_memory import is_mixed, tightest
from meshwright.planner.pins.constraints import memory_cap
from meshwright.planner.problem.placed_kernels import put_in
from meshwright.planner.problem.problem import Problem

DIGITS = 6
"""Significant digits of predicted times: beyond what they mean, and short in a diff."""


def settled(problem: Problem, plan: Plan, *, predict: bool = True) -> Plan:
    """Returns the plan with all that follows from what was decided: kernels in their places, what
    it gives up, and its prediction. Notes for readers follow for plans that are chosen
    (`planner.search.evidence`)."""
    plan = replace(plan, gives_up=given_up(plan), kernels=put_in(problem, plan))
    plan = recorded_where_legal(plan, problem.graph)
    return replace(plan, predicted=predict_plan(problem, plan)) if predict else plan


def predict_plan(problem: Problem, plan: Plan) -> Prediction:
    """What the cost model expects of `plan`, in numbers that read well."""
    found, _ = estimate(problem.graph, problem.cluster, plan, problem.tables)
    memories = [stage.memory for stage in found.stages]
    if any(is_mixed(problem, stage) for stage in plan.stages):
        memories = [memory for memory, _ in tightest(problem, plan)]
    stages = tuple(
        replace(
            stage,
            memory=memory,
            forward_s=_short(stage.forward_s),
            backward_s=_short(stage.backward_s),
            send_s=_short(stage.send_s),
            sync_s=_short(stage.sync_s),
            optimizer_s=_short(stage.optimizer_s),
            hidden_s=_short(stage.hidden_s),
        )
        for stage, memory in zip(found.stages, memories, strict=True)
    )
    return replace(
        found,
        step_s=_short(found.step_s),
        samples_per_s=_short(found.samples_per_s),
        stages=stages,
    )


def in_detail(problem: Problem, plan: Plan) -> Plan:
    """The plan with what reports show of its prediction."""
    assert plan.predicted
    detail = detail_of(problem.tables, plan, memory_cap(problem.constraints))
    return replace(plan, predicted=replace(plan.predicted, detail=detail))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def excess_bytes(problem: Problem, plan: Plan) -> int:
    """By how much the worst rank needs more than it may have; 0 if the plan fits."""
    assert plan.predicted
    if any(is_mixed(problem, stage) for stage in plan.stages):
        return max(0, *(excess for _, excess in tightest(problem, plan)))
    return max(
        0,
        *(
            predicted.memory.used_bytes - problem.room_bytes(stage.devices)
            for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True)
        ),
        *(
            predicted.memory.host_bytes - problem.host_bytes(stage.devices)
            for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True)
            if predicted.memory.host_bytes
        ),
    )
