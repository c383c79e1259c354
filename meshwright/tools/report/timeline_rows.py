"""The timeline in numbers: what each pipeline rank does when, as predicted and as measured."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshwright.costmodel.simulate.replay import Replay
from meshwright.ir.plan.detail import StageDetail
from meshwright.ir.plan.schedule import parse_action
from meshwright.ir.profile.measured import Measured, TimedAction

MOST = 250_000
"""Actions that a page holds; of more rows only some are shown, evenly picked."""
TICKS = 10_000_000
"""A whole timeline in units of its numbers."""
KINDS = {"F": 0, "B": 1, "I": 2, "W": 3, "K": 0, "R": 0}
"""A forward that keeps all, and what is made again, are drawn as forwards."""
_PHASES = ("gradients", "optimizer", "publish")

Bar = tuple[int, int, int, float, float]
"""Kind of work (F, B, I, W, or 4 and on for what ends a step), stage, micro-batch, start, end
in seconds."""


def timeline(
    played: Replay, runs: Sequence[Measured], beside: Replay | None = None
) -> dict[str, Any]:
    """Rows of bars, flat: five numbers each, times in TICKS of `span_s`; with those of another plan
    if one is given."""
    shown = _shown(played)
    predicted = [_bars(played, rank) for rank in shown]
    measured = [_measured(played, runs, rank) for rank in shown] if runs else []
    others = _shown(beside) if beside else []
    other = [_bars(beside, rank) for rank in others] if beside else []
    rows = (*predicted, *measured, *other)
    span_s = max((bar[4] for row in rows for bar in row), default=1.0) or 1.0
    return {
        "span_s": span_s,
        "step_s": played.predicted.step_s,
        "met_s": played.met_s,
        "ticks": TICKS,
        "ranks": shown,
        "left_out": len(played.timeline.table.rows) - len(shown),
        "predicted": [_flat(row, span_s) for row in predicted],
        "measured": [_flat(row, span_s) for row in measured],
        "beside_ranks": others,
        "beside": [_flat(row, span_s) for row in other],
        "stages": len(played.plan.stages),
        "bubble": played.timeline.bubble,
        "collectives": collectives(played),
        "beside_collectives": collectives(beside) if beside else [],
    }


def _shown(played: Replay) -> list[int]:
    """Pipeline ranks that have a row."""
    table = played.timeline.table
    every = max(1, -(-len(table.items) // MOST))
    return list(range(0, len(table.rows), every))


def collectives(played: Replay) -> list[list[float]]:
    """Per stage, the share of each kind of action that is drawn (F, B, I, W) that goes to
    collectives inside blocks, as far as its rank waits for them: of the plainest action drawn so
    that has any. Nothing where the plan keeps no detail."""
    detail = played.detail
    stages = [detail.stage(i) for i in range(len(played.plan.stages))] if detail else []
    return [[_in_collectives(kept, kind) for kind in range(4)] for kept in stages]


def _in_collectives(kept: StageDetail, kind: int) -> float:
    for name in sorted(kept.collectives):  # F before K and R, and B before `B last`
        if KINDS[name[0]] == kind and kept.collectives[name] and kept.actions.get(name):
            return round(kept.collectives[name] / kept.actions[name], 4)
    return 0.0


def _bars(played: Replay, rank: int) -> list[Bar]:
    bars: list[Bar] = [
        (KINDS[action.work], action.stage, action.microbatch, start_s, end_s)
        for action, start_s, end_s in played.timeline.entries[rank]
    ]
    ended, now = played.ending(rank), played.met_s
    for kind, seconds in enumerate((ended.gradients_s, ended.optimizer_s, ended.publish_s), 4):
        if seconds:
            bars.append((kind, -1, -1, now, now + seconds))
            now += seconds
    return bars


def _measured(played: Replay, runs: Sequence[Measured], rank: int) -> list[Bar]:
    """Of the first device of the pipeline rank; empty if it left no timeline. Clocks of ranks are
    laid over each other."""
    stage = played.timeline.table.items[played.timeline.table.rows[rank][0]].stage
    seen = runs[played.plan.stages[stage].devices[0]].timeline
    if seen is None:
        return []
    later_s = seen.started_s - min(run.timeline.started_s for run in runs if run.timeline)
    return [bar for timed in seen.actions for bar in _timed(timed, later_s)]


def _timed(timed: TimedAction, later_s: float) -> Iterator[Bar]:
    """Without the waiting that an action begins with."""
    begun_s = later_s + min(timed.start_s + timed.waiting_s, timed.end_s)
    end_s = later_s + timed.end_s
    if timed.name in _PHASES:
        yield 4 + _PHASES.index(timed.name), -1, -1, begun_s, end_s
    elif timed.name[:1].isdigit():
        action = parse_action(timed.name)
        yield KINDS[action.work], action.stage, action.microbatch, begun_s, end_s


def _flat(bars: Iterable[Bar], span_s: float) -> list[int]:
    found: list[int] = []
    for kind, stage, microbatch, start_s, end_s in bars:
        found += (kind, stage, microbatch, round(start_s / span_s * TICKS),
                  round(end_s / span_s * TICKS))  # fmt: skip
    return found
