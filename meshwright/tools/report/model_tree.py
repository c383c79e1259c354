"""The model as the plan places it: runs of equal blocks, and the parameters of each pattern."""

from itertools import groupby
from typing import Any

from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.plan.detail import BlockName, Detail
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage


def model_tree(plan: Plan) -> dict[str, Any]:
    """Runs of blocks in order, and the layouts that they name."""
    detail = plan.predicted.detail if plan.predicted else None
    used = {name for stage in plan.stages for name in stage.layouts.values()}
    return {
        "runs": _runs(plan, detail) if detail else [],
        "stages": [
            {"first": s.first, "last": s.last, "zero": s.zero, "shard": s.mesh.get("dp_shard", 1)}
            for s in plan.stages
        ],
        "layouts": {
            layout.name: _layout(layout, detail)
            for layout in plan.layouts
            if layout.name in used and layout.pattern != PRELUDE
        },
    }


def _runs(plan: Plan, detail: Detail) -> list[dict[str, Any]]:
    """Neighbouring blocks of one stage, pattern and treatment together."""
    homes = _homes(plan, detail)
    marked = [
        (homes[i], block.pattern, _treatment(plan.stages[homes[i]], block), block.name)
        for i, block in enumerate(detail.blocks)
    ]
    runs = []
    for (stage, pattern, treatment), group in groupby(marked, key=lambda m: m[:3]):
        names = [name for *_, name in group]
        runs.append({
            "stage": stage, "pattern": pattern, "treatment": treatment, "first": names[0],
            "last": names[-1], "count": len(names),
            "layout": plan.stages[stage].layouts.get(pattern, ""),
        })  # fmt: skip
    return runs


def _homes(plan: Plan, detail: Detail) -> list[int]:
    """Stage of each block."""
    ends = {stage.last: i for i, stage in enumerate(plan.stages)}
    homes, stage = [], 0
    for block in detail.blocks:
        homes.append(stage)
        if block.name in ends:
            stage = min(ends[block.name] + 1, len(plan.stages) - 1)
    return homes


def _treatment(stage: Stage, block: BlockName) -> str:
    """What becomes of what the block's backward needs."""
    policy = stage.saved.get(block.name, stage.saved.get(block.pattern, {}))
    if policy:
        return ", ".join(f"{how} {key}" for key, how in sorted(policy.items()))
    how = stage.recompute.get(block.name, stage.recompute.get(block.pattern, "none"))
    return "recomputed" if how == "full" else ""


def _layout(layout: BlockLayout, detail: Detail | None) -> dict[str, Any]:
    shapes = detail.parameters.get(layout.pattern, {}) if detail else {}
    keys = [*shapes, *(key for key in layout.parameters if key not in shapes)]
    return {
        "pattern": layout.pattern,
        "mesh": layout.mesh,
        "parameters": [
            {
                "key": key,
                "shape": list(shapes[key].shape) if key in shapes else [],
                "dtype": shapes[key].dtype if key in shapes else "",
                "nbytes": shapes[key].nbytes if key in shapes else 0,
                "placed": layout.parameters.get(key, {}),
            }
            for key in keys
        ],
        "ops": [[key, placed] for key, placed in layout.ops.items()],
    }
