"""A whole step: the schedule, and what ranks do between the end of one and the start of the next.

All ranks meet when the loss is summed. Then each completes its gradients, takes its optimizer step
and goes on with the next schedule as soon as it is done: a rank whose first action waits for
others anyway may take longer. So a step takes from one meeting to the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.costmodel.stage.program import IDLE, Do, Overlap, Step, aged, play
from meshwright.ir.plan.schedule import Schedule

_CLOSE = 1e-3
"""Ends of ranks that differ by less of a step are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What one pipeline rank does after its schedule."""

    finish: tuple[Step, ...]
    tied_s: float
    """Summing gradients of parameters that other ranks have too, once all have got there."""
    optimizer_s: float
    publish: tuple[Step, ...]
    overlap: Overlap
    clip_s: float = 0.0
    """Gradient clipping; all ranks meet for the norm before any of them goes on."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How long it took, from the meeting on."""

    gradients_s: float
    """Until they are complete and clipped, the waiting for other ranks included."""
    optimizer_s: float
    publish_s: float

    @property
    def total_s(self) -> float:
        return self.gradients_s + self.optimizer_s + self.publish_s


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step."""

    step_s: float
    timeline: Timeline
    ended: tuple[Ended, ...]
    """Per pipeline rank."""


def take_step(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    endings: Sequence[Ending],
    *,
    meeting_s: float,
    cores: float = float("inf"),
    talking: float = 0.0,
    detail: bool = False,
) -> StepTimes:
    """The step of a job that has been running for a while. `meeting_s`: summing the loss."""
    known = {"cores": cores, "talking": talking, "detail": detail}
    guess = tuple(_alone(ending) for ending in endings)
    offsets = _offsets(guess)
    timeline = simulate(schedule, stages, offsets=offsets, **known)  # type: ignore[arg-type]
    ended = _end(timeline, endings, meeting_s)
    better = _offsets([e.total_s for e in ended])
    if any(abs(a - b) > _CLOSE * timeline.step_s for a, b in zip(offsets, better, strict=True)):
        # Where cores are shared a rank's end of a step slows those that have begun the next.
        alone = cores == float("inf") and not detail
        moved = _moved(timeline, offsets, better) if alone else None
        timeline = moved or simulate(schedule, stages, offsets=better, **known)  # type: ignore[arg-type]
        ended = ended if moved else _end(timeline, endings, meeting_s)
    return StepTimes(timeline.step_s + meeting_s + min(e.total_s for e in ended), timeline, ended)


def _alone(ending: Ending) -> float:
    """Seconds of an ending that finds the channel idle."""
    steps = (*ending.finish, *ending.publish)
    own = sum([step.seconds for step in steps if step.do <= Do.TALK])
    return own + ending.tied_s + ending.clip_s + ending.optimizer_s


def _offsets(totals: Sequence[float]) -> tuple[float, ...]:
    """By how much each rank starts later than the first."""
    least = min(totals)
    return tuple(total - least for total in totals)


def _moved(
    timeline: Timeline, offsets: Sequence[float], better: Sequence[float]
) -> Timeline | None:
    """The timeline with better offsets, if they change nothing but when all of it begins.

    A rank whose first message is made later than it could begin may as well begin later.
    """
    rows, items, ends = timeline.table.rows, timeline.table.items, timeline.ran.ends
    waits = [items[row[0]].source >= 0 for row in rows]
    if all(waits) or timeline.ran.gone:
        return None
    later = better[waits.index(False)] - offsets[waits.index(False)]
    for row, waiting, old, new in zip(rows, waits, offsets, better, strict=True):
        if not waiting and abs(new - old - later) > _CLOSE * timeline.step_s:
            return None
        made = [ends[items[p].source] for p in row[:2] if items[p].source >= 0]
        if waiting and min(made) < max(old, new - later):
            return None
    return timeline.moved(later, tuple(better))


def _end(timeline: Timeline, endings: Sequence[Ending], meeting_s: float) -> tuple[Ended, ...]:
    """What the ranks do from their meeting on."""
    met_s = timeline.step_s + meeting_s
    ready = []
    for rank, ending in enumerate(endings):
        left = aged(timeline.ran.channels[rank], met_s - timeline.row_end_s[rank])
        ready.append(play(ending.finish, left, ending.overlap)[0])
    return tuple(
        Ended(gradients, ending.optimizer_s, play(ending.publish, IDLE, ending.overlap)[0])
        for gradients, ending in zip(_clipped(_tied(ready, endings), endings), endings, strict=True)
    )


def _tied(ready: Sequence[float], endings: Sequence[Ending]) -> list[float]:
    """When gradients are complete, those of parameters that several ranks hold included."""
    met_s = max((r for r, e in zip(ready, endings, strict=True) if e.tied_s), default=0.0)
    return [
        max(own_s, met_s) + ending.tied_s if ending.tied_s else own_s
        for own_s, ending in zip(ready, endings, strict=True)
    ]


def _clipped(ready: Sequence[float], endings: Sequence[Ending]) -> Sequence[float]:
    if not any(ending.clip_s for ending in endings):
        return ready
    return [max(ready) + ending.clip_s for ending in endings]


def slowed(steps: Sequence[Step], factor: float) -> tuple[Step, ...]:
    """The steps where all ranks compute at once on cores that they share."""
    if factor == 1.0:
        return tuple(steps)
    return tuple(s._replace(seconds=s.seconds * factor) if s.do == Do.RUN else s for s in steps)


def in_turn(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps where nothing that is under way hides anything: it is waited for at once."""
    own = [step for step in steps if step.do in (Do.RUN, Do.TALK, Do.START)]
    return tuple(s._replace(do=Do.TALK) if s.do is Do.START else s for s in own)


def by_stage(schedule_owner: Sequence[int]) -> Mapping[int, list[int]]:
    """Pipeline rank -> its stages."""
    found: dict[int, list[int]] = {}
    for stage, rank in enumerate(schedule_owner):
        found.setdefault(rank, []).append(stage)
    return found
