"""What the cost model says of a plan, in the terms in which a run is measured."""

from collections.abc import Mapping
from datetime import UTC, datetime

from benchmarks.accuracy.data import Predicted
from meshwright.costmodel.estimate import estimate
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Breakdown
from meshwright.planner.problem.problem import Problem


def predicted(model: str, name: str, problem: Problem, plan: Plan, base_bytes: int) -> Predicted:
    """The prediction of a plan; `plan.predicted` is the same one, rounded."""
    found, _ = estimate(problem.graph, problem.cluster, plan, problem.tables)
    assert found.breakdown
    memories = [stage.memory for stage in found.stages]
    return Predicted(
        model=model,
        plan=name,
        ranks=plan.world_size,
        hash=plan.hash,
        step_s=found.step_s,
        error_band=found.error_band,
        source=found.source,
        seconds=seconds(found.breakdown),
        base_bytes=base_bytes,
        tensor_bytes=max(memory.tensor_bytes for memory in memories),
        resident_bytes=base_bytes + max(memory.used_bytes for memory in memories),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def seconds(parts: Breakdown) -> Mapping[str, float]:
    """By kind, of the rank that waits least."""
    return {
        "forward": parts.forward_s,
        "backward": parts.backward_s + parts.recompute_s,
        "collectives": parts.tensor_s + parts.gradients_s + parts.gather_s,
        "wait": parts.wait_s,
        "optimizer": parts.optimizer_s,
        "rest": parts.overhead_s,
    }
