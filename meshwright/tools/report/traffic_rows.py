"""Communication of a step by purpose, axis and link tier; and message by message among replicas."""

from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

from meshwright.ir.plan.detail import StageTraffic, SyncMessage
from meshwright.ir.plan.plan import Plan


def traffic_rows(plan: Plan) -> list[dict[str, Any]]:
    """Most seconds first; empty for a plan without detail."""
    detail = plan.predicted.detail if plan.predicted else None
    if detail is None:
        return []
    found: dict[tuple[str, str, str], dict[int, StageTraffic]] = defaultdict(dict)
    for index in range(len(plan.stages)):
        for one in detail.stage(index).traffic:
            own = found[one.purpose, one.axis, one.link]
            known = own.get(index)
            own[index] = one if known is None else replace(
                one, nbytes=known.nbytes + one.nbytes, seconds=known.seconds + one.seconds
            )  # fmt: skip
    rows = [
        {
            "purpose": purpose,
            "axis": axis,
            "link": link,
            "rate": detail.links.get(link, 0.0),
            "total": sum(one.nbytes * len(plan.stages[i].devices) for i, one in by_stage.items()),
            "stages": {i: [one.nbytes, one.seconds] for i, one in by_stage.items()},
        }
        for (purpose, axis, link), by_stage in found.items()
    ]
    return sorted(rows, key=lambda row: -max(seconds for _, seconds in row["stages"].values()))


def message_rows(plan: Plan) -> list[dict[str, Any]]:
    """Messages among replicas, in the order in which they go; stages that send alike together."""
    detail = plan.predicted.detail if plan.predicted else None
    found: dict[SyncMessage, list[int]] = {}
    for index in range(len(plan.stages)) if detail else ():
        for one in detail.stage(index).messages if detail else ():
            found.setdefault(one, []).append(index)
    return [{**asdict(one), "stages": stages} for one, stages in found.items()]
