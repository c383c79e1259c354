"""What a plan says of itself that takes some reckoning: shares, peaks, what is in flight."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from meshwright.costmodel.memory.memory_timeline import held_stages
from meshwright.costmodel.simulate.replay import Replay, replay
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import RankMemory
from meshwright.ir.plan.schedule import FORWARDS, Work
from meshwright.tools.report.ranks import rank_rows

SAME = 0.005
"""Ranks whose shares of the step differ by less are one row."""


@dataclass(frozen=True)
class Facts:
    """Of a plan with a prediction."""

    played: Replay

    @classmethod
    def of(cls, plan: Plan) -> "Facts":
        return cls(replay(plan))

    @property
    def plan(self) -> Plan:
        return self.played.plan

    @property
    def step_s(self) -> float:
        return self.played.predicted.step_s

    @cached_property
    def seconds(self) -> tuple[Mapping[str, float], ...]:
        """Per pipeline rank, by category."""
        return tuple(row["seconds"] for row in rank_rows(self.played))

    @cached_property
    def busiest(self) -> int:
        """The pipeline rank that waits least."""
        return min(range(len(self.seconds)), key=lambda r: self.seconds[r].get("wait", 0.0))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline ranks that spend their step alike, in order."""
        found: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank, seconds in enumerate(self.seconds):
            key = tuple((k, round(s / self.step_s / SAME)) for k, s in sorted(seconds.items()))
            found.setdefault(key, []).append(rank)
        return tuple(map(tuple, found.values()))

    def memory(self, rank: int) -> RankMemory:
        return self.played.predicted.stages[self.stages(rank)[0]].memory

    def stages(self, rank: int) -> tuple[int, ...]:
        """Of a pipeline rank."""
        return held_stages(self.played.timeline.table, rank)

    def room(self, rank: int) -> int | None:
        """Bytes that a plan may use on the tightest device of a pipeline rank, if it is known."""
        detail = self.played.detail
        devices = self.plan.stages[self.stages(rank)[0]].devices
        return min(detail.device(d).room_bytes for d in devices) if detail else None

    @cached_property
    def fullest(self) -> int:
        """The pipeline rank with the least to spare."""

        def spare(rank: int) -> float:
            room = self.room(rank)
            return (room or 0) - self.memory(rank).used_bytes

        return min(range(len(self.seconds)), key=spare)

    def in_flight(self, rank: int) -> int:
        """The most micro-batches of its stages that a pipeline rank holds at once."""
        held = most = 0
        for action in self.played.timeline.table.schedule.ranks[rank]:
            held += action.work in FORWARDS
            most = max(most, held)
            held -= action.work in (Work.BACKWARD, Work.BACKWARD_WEIGHT)
        return most
