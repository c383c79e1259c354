"""What a run took beside what was predicted."""

from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.explain.compare import compare, expected_of
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.measured import Measured

ROWS = 40


def measured_rows(plan: Plan, runs: Sequence[Measured]) -> dict[str, Any]:
    """The comparison, the worst first, each step's seconds on the slowest rank, and which way calls
    of fused kernels went."""
    found = compare(plan, expected_of(plan), runs)
    steps = [
        max(run.steps[i].step_s for run in runs if i < len(run.steps))
        for i in range(max(len(run.steps) for run in runs))
    ]
    return {
        "verdict": found.verdict,
        "inside": found.inside,
        "machine": runs[0].machine.device,
        "steps": [[steps[i], runs[0].steps[i].kind] for i in range(len(runs[0].steps))],
        "rows": [
            {"group": row.group, "what": row.what, "unit": row.unit, "predicted": row.predicted,
             "measured": row.measured, "error": row.error}
            for row in (found.step, *found.rows)[:ROWS]
        ],
        "kernels": [
            {"kernel": one.kernel, "way": one.way, "why": one.why, "calls": one.calls}
            for one in found.kernels
        ],
        "caches": [
            {"table": one.table, "slots": one.slots, "rows": one.rows, "hits": one.hit_rate,
             "written": one.written, "rank": run.rank}
            for run in runs for one in run.caches
        ],
    }  # fmt: skip
