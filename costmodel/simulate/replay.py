"""A step of a plan again, from what the plan keeps: without its model and its cluster.

Every action takes the mean of its kind. A plan without detail has the seconds of its stages only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.costmodel.explain.detail import KIND_NAMES
from meshwright.costmodel.memory.memory_timeline import Point, held_stages, over_time
from meshwright.costmodel.memory.stage_memory import Bytes
from meshwright.costmodel.simulate.compiled_schedule import LAST
from meshwright.costmodel.simulate.simulate import NAMES, HiddenTogether, StageTimes, simulate
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.costmodel.stage.program import Program, run
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.detail import Detail, Moving, RankDetail, StageDetail
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction, StagePrediction
from meshwright.ir.plan.verify import check
from meshwright.ir.styles import style

_CODES = {name: kind for kind, name in KIND_NAMES.items()}


@dataclass(frozen=True)
class Replay:
    """A step as the plan's figures have it."""

    plan: Plan
    predicted: Prediction
    timeline: Timeline

    @property
    def detail(self) -> Detail | None:
        return self.predicted.detail

    def ending(self, rank: int) -> RankDetail:
        """What a pipeline rank does when its schedule is over."""
        if self.detail:
            return self.detail.ranks[rank]
        own = [self.predicted.stages[i] for i in held_stages(self.timeline.table, rank)]
        return RankDetail(
            starts_s=0.0, gradients_s=max(s.sync_s for s in own),
            optimizer_s=sum(s.optimizer_s for s in own), publish_s=0.0, seconds={},
        )  # fmt: skip

    @property
    def met_s(self) -> float:
        """When all ranks have summed the loss."""
        return self.timeline.step_s + (self.detail.meeting_s if self.detail else 0.0)

    def memory(self, rank: int) -> tuple[Point, ...]:
        """What a pipeline rank holds beside parameters and optimizer state; empty if not known."""
        return over_time(self.timeline, rank, self._kept) if self._kept else ()

    @cached_property
    def _kept(self) -> tuple["_Kept", ...]:
        """Per stage; nothing where it is not known."""
        detail, stages = self.detail, range(len(self.plan.stages))
        return tuple(_Kept(detail.stage(i)) for i in stages) if detail else ()


def replay(plan: Plan, *, messages: bool = False) -> Replay:
    """The step of a plan that has a prediction; with a log of its messages if asked for."""
    if plan.predicted is None:
        raise PlanError(
            "the plan has no prediction, so there is no timeline; search writes one, and so does "
            "`meshwright check` for plans by hand"
        )
    check(plan)
    predicted, detail = plan.predicted, plan.predicted.detail
    waits = style(plan.style).blocking_sends
    times = tuple(
        replace(
            _from_detail(detail.stage(i), stage) if detail else _from_stage(stage), blocks=waits
        )
        for i, stage in enumerate(predicted.stages)
    )
    offsets = tuple(rank.starts_s for rank in detail.ranks) if detail else ()
    timeline = simulate(plan.schedule.parse(), times, offsets=offsets, detail=messages)
    return Replay(plan, predicted, timeline)


def _from_detail(kept: StageDetail, predicted: StagePrediction) -> StageTimes:
    pairs = {int(stage): HiddenTogether(whole_s=seconds) for stage, seconds in kept.pairs.items()}
    return replace(
        _times(kept.actions, predicted, kept.saved_bytes),
        together=pairs,
        back_s=kept.back_s,
        is_silent=predicted.send_s > 0 and kept.border_back_bytes == 0,
    )


def _from_stage(predicted: StagePrediction) -> StageTimes:
    """Halves of a backward are taken as equal."""
    half_s = predicted.backward_s / 2
    known = {"F": predicted.forward_s, "B": predicted.backward_s, "I": half_s, "W": half_s}
    return _times(known, predicted, 0)


def _times(actions: Mapping[str, float], predicted: StagePrediction, saved: int) -> StageTimes:
    return StageTimes(
        forward_s=actions.get("F", 0.0),
        backward_s=actions.get("B", 0.0),
        send_s=predicted.send_s,
        saved_bytes=saved,
        programs={
            _CODES[name]: Program((run(seconds, NAMES[_CODES[name] & (LAST - 1)]),))
            for name, seconds in actions.items()
        },
    )


class _Kept:
    """A stage's memory as the plan keeps it (`stage_memory.Holding`)."""

    slots, landings = None, ()
    """What stays from step to step is in what is always there."""

    def __init__(self, kept: StageDetail) -> None:
        self.always, self.begun = _bytes(kept.always), _bytes(kept.begun)
        self.saved, self.halved = kept.saved_bytes, kept.halved_bytes
        self.entry, self.border, self.sent = kept.entry_bytes, kept.border_bytes, kept.sent_bytes
        self.entry_back = _known(kept.entry_back_bytes, self.entry)
        self.border_back = _known(kept.border_back_bytes, self.border)
        self.shared = kept.shared_bytes
        self.forward, self.halving = _bytes(kept.rises["F"]), _bytes(kept.rises["I"])
        self.kept_saved = kept.kept_bytes
        self._rises = kept.rises

    @property
    def keeping(self) -> Bytes:
        return _bytes(self._rises["K"])

    @property
    def remaking(self) -> Bytes:
        return _bytes(self._rises["R"])

    @property
    def kept_halving(self) -> Bytes:
        return _bytes(self._rises["I held"])

    def backward(
        self, *, first: bool, last: bool, held: bool = False, second: bool = False
    ) -> Bytes:
        words = [*["first"] * first, *["last"] * last, *["held"] * held]
        own = " ".join(["W", *words])
        if not second or own not in self._rises:  # a plan from before may lack second halves
            own = " ".join(["B", *words])
        return _bytes(self._rises[own])


def _known(nbytes: int | None, otherwise: int) -> int:
    return otherwise if nbytes is None else nbytes


def _bytes(moving: Moving) -> Bytes:
    return Bytes(moving.gradients, moving.activations, moving.communication, moving.workspace)
