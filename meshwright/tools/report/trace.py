"""The predicted step as a Chrome trace, for Perfetto or chrome://tracing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.costmodel.memory.memory_timeline import held_stages
from meshwright.costmodel.simulate.replay import Replay, replay
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import Work
from meshwright.ir.plan.show import ranges
from meshwright.tools.report.timeline_rows import KINDS, collectives

_NAMES = {Work.FORWARD: "forward", Work.BACKWARD: "backward", Work.BACKWARD_INPUT: "backward",
          Work.BACKWARD_WEIGHT: "backward weights", Work.FORWARD_KEEPING: "forward",
          Work.RECOMPUTE: "recompute"}  # fmt: skip
_COLOURS = {Work.FORWARD: "thread_state_running", Work.BACKWARD: "thread_state_iowait",
            Work.BACKWARD_INPUT: "thread_state_iowait",
            Work.BACKWARD_WEIGHT: "thread_state_runnable",
            Work.FORWARD_KEEPING: "thread_state_running",
            Work.RECOMPUTE: "thread_state_runnable"}  # fmt: skip
_COMPUTE, _MESSAGES, _COLLECTIVES = 0, 1, 2
Event = dict[str, Any]


def write_trace(plan: Plan, path: str | Path) -> None:
    """Writes one process per pipeline rank: actions, messages that come in, memory."""
    Path(path).write_text(json.dumps(trace(plan), allow_nan=False), encoding="utf-8")


def trace(plan: Plan) -> dict[str, Any]:
    """The events, times in microseconds."""
    played = replay(plan, messages=True)
    shares, ranks = collectives(played), range(len(plan.schedule.rows))
    events = [event for rank in ranks for event in _rank(played, rank, shares)]
    events += _messages(played)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"plan": plan.hash, "model": plan.model.name, "cluster": plan.cluster.name},
    }


def _rank(played: Replay, rank: int, shares: list[list[float]]) -> Iterator[Event]:
    """`shares`: as `collectives` gives them. When in an action they go is not known: they are drawn
    at its end."""
    own = held_stages(played.timeline.table, rank)
    devices = ranges(played.plan.stages[own[0]].devices)
    yield _meta("process_name", rank, f"pipeline rank {rank}: devices {devices}")
    yield _meta("process_sort_index", rank, rank)
    yield _meta("thread_name", rank, "compute", _COMPUTE)
    yield _meta("thread_name", rank, "messages", _MESSAGES)
    if any(any(shares[stage]) for stage in own if shares):
        yield _meta("thread_name", rank, "collectives in blocks", _COLLECTIVES)
    for action, start_s, end_s in played.timeline.entries[rank]:
        yield _bar(rank, _COMPUTE, str(action), start_s, end_s, cat=_NAMES[action.work],
                   cname=_COLOURS[action.work],
                   args={"stage": action.stage, "microbatch": action.microbatch})  # fmt: skip
        share = shares[action.stage][KINDS[action.work]] if shares else 0.0
        if share:
            yield _bar(rank, _COLLECTIVES, f"in {action}", end_s - share * (end_s - start_s), end_s,
                       cat="collectives in blocks")  # fmt: skip
    yield from _ending(played, rank)
    yield from _memory(played, rank, own)


def _ending(played: Replay, rank: int) -> Iterator[Event]:
    ended, now = played.ending(rank), played.met_s
    for name in ("gradients", "optimizer", "publish"):
        seconds = getattr(ended, f"{name}_s")
        if seconds:
            yield _bar(rank, _COMPUTE, name, now, now + seconds, cat="step")
        now += seconds


def _memory(played: Replay, rank: int, own: tuple[int, ...]) -> Iterator[Event]:
    """A counter of what the rank holds, by category, in bytes."""
    memory = played.predicted.stages[own[0]].memory
    always = {"parameters": memory.parameters_bytes, "optimizer": memory.optimizer_bytes}
    for time_s, held in played.memory(rank):
        yield {"ph": "C", "pid": rank, "name": "memory", "ts": time_s * 1e6,
               "args": always | held._asdict()}  # fmt: skip


def _messages(played: Replay) -> Iterator[Event]:
    """A message may begin to travel while the one before is still read: they go async."""
    found = (logged for logged in played.timeline.log if logged.channel == "message")
    for number, (rank, _, what, start_s, end_s) in enumerate(found):
        for phase, at_s in (("b", start_s), ("e", max(start_s, end_s))):
            yield {"ph": phase, "id": number, "pid": rank, "tid": _MESSAGES, "cat": "message",
                   "name": f"for {what}", "ts": at_s * 1e6}  # fmt: skip


def _meta(kind: str, rank: int, value: str | int, thread: int = _COMPUTE) -> Event:
    key = "sort_index" if kind.endswith("index") else "name"
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {key: value}}


def _bar(rank: int, thread: int, name: str, start_s: float, end_s: float, **more: Any) -> Event:
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start_s * 1e6,
            "dur": max(0.0, end_s - start_s) * 1e6, **more}  # fmt: skip
