"""What the cost model says of a plan, in the terms in which a run is measured."""

from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import mean

from benchmarks.accuracy_data import Predicted
from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.simulate import Timeline
from meshwright.ir.plan import Plan, Prediction
from meshwright.ir.schedule import Work
from meshwright.planner.problem import Problem


def predicted(model: str, name: str, problem: Problem, plan: Plan, base_bytes: int) -> Predicted:
    """The prediction of a plan; `plan.predicted` is the same one, rounded."""
    found, timeline = estimate(problem.graph, problem.cluster, plan, problem.tables)
    return Predicted(
        model=model,
        plan=name,
        ranks=plan.world_size,
        hash=plan.hash,
        step_s=found.step_s,
        error_band=found.error_band,
        source=found.source,
        seconds=seconds(plan, found, timeline),
        base_bytes=base_bytes,
        tensor_bytes=found.peak_bytes,
        resident_bytes=base_bytes + found.peak_bytes,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def seconds(plan: Plan, found: Prediction, timeline: Timeline) -> Mapping[str, float]:
    """By kind, mean over ranks. Waiting is what is left of the time until a rank's last action."""
    rows = []
    for entries in timeline.entries:
        held = sorted({entry.action.stage for entry in entries})
        took = {work: sum(e.end_s - e.start_s for e in entries if e.action.work is work)
                for work in Work}  # fmt: skip
        forward = took.pop(Work.FORWARD)
        row = {
            "forward": forward,
            "backward": sum(took.values()),
            "wait": entries[-1].end_s - forward - sum(took.values()),
            "collectives": sum(found.stages[i].sync_s for i in held),
            "optimizer": sum(found.stages[i].optimizer_s for i in held),
        }
        rows += [row] * len(plan.stages[held[0]].devices)
    kinds = {kind: mean(row[kind] for row in rows) for kind in rows[0]}
    return kinds | {"rest": found.step_s - sum(kinds.values())}
