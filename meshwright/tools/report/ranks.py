"""Pipeline ranks: their stages, devices, and where their seconds go."""

from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.memory.memory_timeline import held_stages
from meshwright.costmodel.simulate.replay import Replay
from meshwright.ir.plan.plan import Stage
from meshwright.ir.plan.show import ranges


def rank_rows(played: Replay) -> list[dict[str, Any]]:
    """One row per pipeline rank."""
    return [_row(played, rank) for rank in range(len(played.timeline.table.rows))]


def _row(played: Replay, rank: int) -> dict[str, Any]:
    own = held_stages(played.timeline.table, rank)
    stage = played.plan.stages[own[0]]
    seconds = played.ending(rank).seconds or _seconds(played, rank)
    return {
        "stages": list(own),
        "devices": ranges(stage.devices),
        "count": len(stage.devices),
        "mesh": mesh_text(stage),
        "zero": max(played.plan.stages[i].zero for i in own),
        "blocks": [[played.plan.stages[i].first, played.plan.stages[i].last] for i in own],
        "seconds": seconds,
        "late": _late(played, own),
    }


def _late(played: Replay, own: Sequence[int]) -> list[tuple[str, float]]:
    """Forms of synchronisation that stages name, and the seconds that the next forward hides."""
    stages, predicted = played.plan.stages, played.predicted.stages
    return [
        (str(stages[i].sync), predicted[i].hidden_s if predicted else 0.0)
        for i in own
        if stages[i].sync and stages[i].dp > 1
    ]


def _seconds(played: Replay, rank: int) -> dict[str, float]:
    """Of a plan without detail."""
    ended = played.ending(rank)
    found = {"forward": 0.0, "backward": 0.0}
    for action, start_s, end_s in played.timeline.entries[rank]:
        found["forward" if action.work == "F" else "backward"] += end_s - start_s
    found |= {"gradients": ended.gradients_s, "optimizer": ended.optimizer_s}
    found["wait"] = max(0.0, played.predicted.step_s - sum(found.values()))
    return found


def mesh_text(stage: Stage) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in stage.mesh.items() if n > 1) or "one device"
