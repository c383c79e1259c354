"""Memory of pipeline ranks: peaks by category against the device's limit, and over time."""

from collections.abc import Sequence
from typing import Any

from meshwright.costmodel.memory.memory_timeline import Point, held_stages
from meshwright.costmodel.simulate.replay import Replay
from meshwright.ir.plan.predicted import RankMemory
from meshwright.tools.report.timeline_rows import TICKS

CURVES = 64
"""Groups of equal ranks whose memory is drawn over time: the fullest."""
POINTS = 700
CATEGORIES = ("parameters", "optimizer", "inputs", "fragmentation", "gradients", "activations",
              "communication", "workspace")  # fmt: skip
"""What stays, then what comes and goes; outside of them is the process itself."""


def memory_groups(played: Replay) -> list[dict[str, Any]]:
    """Ranks that hold the same together, the fullest first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(len(played.timeline.table.rows)):
        memory, room = _peak(played, rank), _room(played, rank)
        groups.setdefault((memory, room), []).append(rank)
    fullest = sorted(groups.items(), key=lambda item: -_fullness(*item[0]))
    return [
        _group(played, memory, room, ranks, with_curve=i < CURVES)
        for i, ((memory, room), ranks) in enumerate(fullest)
    ]


def _fullness(memory: RankMemory, room: int | None) -> float:
    return memory.used_bytes / room if room else float(memory.used_bytes)


def _peak(played: Replay, rank: int) -> RankMemory:
    return played.predicted.stages[held_stages(played.timeline.table, rank)[0]].memory


def _room(played: Replay, rank: int) -> int | None:
    """What the tightest of the rank's devices may use, if the plan says."""
    if played.detail is None:
        return None
    stage = held_stages(played.timeline.table, rank)[0]
    devices = played.plan.stages[stage].devices
    return min(played.detail.device(device).room_bytes for device in devices)


def _group(
    played: Replay, memory: RankMemory, room: int | None, ranks: Sequence[int], *, with_curve: bool
) -> dict[str, Any]:
    return {
        "ranks": list(ranks),
        "room": room,
        "used": memory.used_bytes,
        "process": memory.process_bytes,
        "host": memory.host_bytes,
        "peak": {name: getattr(memory, f"{name}_bytes") for name in CATEGORIES},
        "curve": _curve(played, ranks[0]) if with_curve else [],
    }


def _curve(played: Replay, rank: int) -> list[list[int]]:
    """(ticks of the schedule, gradients, activations, communication, workspace) from each point."""
    points = _thinned(played.memory(rank), played.met_s)
    scale = TICKS / (played.met_s or 1.0)
    return [[round(point.time_s * scale), *point.held] for point in points]


def _thinned(points: Sequence[Point], span_s: float) -> list[Point]:
    """Of many points, in each short while those where most and least is held."""
    if len(points) <= POINTS:
        return list(points)
    slots: dict[int, list[Point]] = {}
    for point in points:
        slots.setdefault(int(point.time_s / span_s * POINTS / 2), []).append(point)
    found: list[Point] = []
    for slot in slots.values():
        high = max(slot, key=lambda point: point.held.total)
        low = min(slot, key=lambda point: point.held.total)
        found += sorted({id(p): p for p in (high, low)}.values(), key=lambda p: p.time_s)
    return found
