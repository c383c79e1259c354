"""List scheduling in true times: each rank takes, of what it can start, what is due first.

An action of micro-batch m is due when it would run if a micro-batch followed the other at the
period of the busiest rank and nobody waited. What is due later may be put off (`Rules`). Forwards
wait for memory; a backward is taken whole where its halves would hold too much.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import ceil

from meshwright.costmodel.table import B, F, I, W
from meshwright.planner.synthesis.bound import way_s
from meshwright.planner.synthesis.task import Row, Task

_NEVER = float("inf")
_LATEST = 1e9


@dataclass(frozen=True, slots=True)
class Rules:
    """How one list schedule decides."""

    period: float
    """By which the due dates of micro-batches lie apart, in periods of the busiest rank."""
    delay: float
    """How much later weight halves are due, in such periods."""
    late: float
    """Share of a weight half by which it may keep waiting what is known to come."""
    lead: int | None
    """Micro-batches between forward and backward beyond those that a stage needs to be never idle;
    None: as many as memory allows."""
    split: bool
    """Backwards in halves."""


_DELAYS = (0.0, 0.5, 1.0, 2.0, _LATEST)
_MANY = product((1.0, 0.5, 0.0), _DELAYS, (0.0, 0.5, 1.0), (None,))
_AHEAD = product((0.5, 0.0), _DELAYS, (1.0,), (0, 1))
RULES = (
    *(Rules(*asked, split=True) for asked in (*_MANY, *_AHEAD)),
    *(Rules(period, 0.0, 0.0, None, split=False) for period in (1.0, 0.5, 0.0)),
)
"""Those that were best for some of many random tasks."""


def list_schedule(task: Task, rules: Rules) -> tuple[float, list[Row]]:
    """(seconds, rows)."""
    made = _Greedy(task, rules)
    made.run()
    assert not made.left, "the oldest micro-batch can always go on"
    return max(made.free), made.rows


class _Greedy:
    """One list schedule in the making."""

    def __init__(self, task: Task, rules: Rules) -> None:
        self.task, self.rules = task, rules
        count, num_stages = task.num_microbatches, len(task.stages)
        busy = [sum(task.seconds[s][F] + task.seconds[s][B] for s in own) for own in task.held]
        self.base_s = max(busy)
        self.period_s = self.base_s * rules.period
        forward, backward = way_s(task)
        put_off = min(rules.delay, _LATEST) * self.base_s
        self.due = {
            F: forward,
            I: backward,
            W: tuple(b + s[I] + put_off for b, s in zip(backward, task.seconds, strict=True)),
        }
        moves = max(sum(task.seconds[s][F] + task.seconds[s][I] for s in own) for own in task.held)
        self.most_ahead = [
            count if rules.lead is None else ceil((b + s[I] - f) / moves - 1e-9) + rules.lead
            for f, b, s in zip(forward, backward, task.seconds, strict=True)
        ]
        """Per stage, forwards ahead of backwards."""
        self.count = {kind: [0] * num_stages for kind in (F, I, W)}
        self.split = [[False] * count for _ in range(num_stages)]
        """Of each backward that has begun, whether it is in halves."""
        self.made = {kind: [[_NEVER] * count for _ in range(num_stages)] for kind in (F, I)}
        """When what a forward or backward needs of its neighbour is there to be sent."""
        self.made[F][0] = [0.0] * count
        self.free = list(task.release)
        self.asked = list(task.release)
        """A rank asks for a message when it starts the action before."""
        self.held = [0.0] * task.num_ranks
        """Bytes, of micro-batches in flight and between halves."""
        self.rows: list[Row] = [[] for _ in range(task.num_ranks)]
        self.left = 2 * num_stages * count
        self.heap = [(time, rank) for rank, time in enumerate(self.free)]

    def run(self) -> None:
        while self.left and self.heap:
            now, rank = heappop(self.heap)
            if now >= self.free[rank]:
                self._decide(now, rank)

    def _decide(self, now: float, rank: int) -> None:
        """Take an action, or wait for what is known to come."""
        own = self.task.held[rank]
        weights = [(stage, self._next_weight(stage)) for stage in own]
        ready, soonest = self._moves(now, rank)
        patient = not ready
        ready += [
            (number * self.period_s + self.due[W][stage], W, stage, number)
            for stage, number in weights
            if number is not None
        ]
        if ready:
            _, kind, stage, number = min(ready)
            late = now + self.task.seconds[stage][W] * (1 - self.rules.late) > soonest
            if not (patient and late):
                self._take(now, rank, kind, stage, number)
                return
        if soonest < _NEVER:
            heappush(self.heap, (soonest, rank))

    def _moves(self, now: float, rank: int) -> tuple[list[tuple[float, int, int, int]], float]:
        """Forwards and backwards that can start now, by due date, and when the next one can."""
        ready, soonest = [], _NEVER
        for stage in self.task.held[rank]:
            for kind in (I, F):
                number = self.count[kind][stage]
                if number == self.task.num_microbatches or (kind == F and not self._fits(stage)):
                    continue
                at = self._arrival(rank, kind, stage, number)
                if at <= now:
                    due = number * self.period_s + self.due[kind][stage]
                    ready.append((due, kind, stage, number))
                elif at < soonest:
                    soonest = at
        return ready, soonest

    def _arrival(self, rank: int, kind: int, stage: int, number: int) -> float:
        made = self.made[kind][stage][number]
        sender = stage - 1 if kind == F else stage + 1
        if not 0 <= sender < len(self.task.stages):
            return made
        send_s = self.task.sends_s[min(stage, sender)]
        return max(made, self.asked[rank]) + send_s if send_s else made

    def _fits(self, stage: int) -> bool:
        """Whether a forward finds memory."""
        if self.count[F][stage] - self.count[I][stage] >= self.most_ahead[stage]:
            return False
        rank = self.task.placement[stage]
        saved = self.task.stages[stage].saved_bytes
        left = self._owed(rank, stage if self._oldest(rank) == self.count[F][stage] else -1)
        room = self.task.capacity[rank] - self.held[rank] - saved - left
        return room >= 0 and self._lets_on(rank, stage)

    def _lets_on(self, rank: int, stage: int) -> bool:
        """Whether after a forward of the stage the first micro-batch that the rank has not taken
        through all its stages finds memory, once those before it are gone."""
        begun = {s: self.count[F][s] + (s == stage) for s in self.task.held[rank]}
        first = min(begun.values())
        if first == self.task.num_microbatches:
            return True
        held = sum(
            self.task.stages[s].saved_bytes * max(1, count - first) for s, count in begun.items()
        )
        return held <= self.task.capacity[rank]

    def _oldest(self, rank: int) -> int:
        """The first micro-batch that the rank is not done with."""
        return min(self.count[W][stage] for stage in self.task.held[rank])

    def _owed(self, rank: int, but: int = -1) -> int:
        """Bytes that the oldest micro-batch will still take, stage `but` left out. They are kept
        for it: so it always comes to its end, and no rank waits for ever."""
        oldest = self._oldest(rank)
        return sum(
            self.task.stages[stage].saved_bytes
            for stage in self.task.held[rank]
            if stage != but and self.count[F][stage] <= oldest
        )

    def _next_weight(self, stage: int) -> int | None:
        """The micro-batch whose weight half is next, if its input half is over."""
        number, split = self.count[W][stage], self.split[stage]
        while number < self.count[I][stage] and not split[number]:
            number += 1
        self.count[W][stage] = number
        return number if number < self.count[I][stage] else None

    def _take(self, now: float, rank: int, kind: int, stage: int, number: int) -> None:
        if kind == I and not self._halves(rank, stage):
            kind = B
        end = now + self.task.seconds[stage][kind]
        self.asked[rank], self.free[rank] = now, end
        self.rows[rank].append((stage, kind))
        self.left -= kind != W
        if kind == F:
            self.held[rank] += self.task.stages[stage].saved_bytes
            self._pass_on(end, F, stage + 1, number)
        elif kind in (B, I):
            self._pass_on(end, I, stage - 1, number)
        self.count[I if kind == B else kind][stage] += 1
        if kind == I:
            self.split[stage][number] = True
            self.held[rank] += self.task.halved[stage]
            self.left += 1
        if kind in (B, W):
            self.held[rank] -= self.task.stages[stage].saved_bytes
        if kind == W:
            self.left -= 1
            self.held[rank] -= self.task.halved[stage]
        heappush(self.heap, (end, rank))

    def _halves(self, rank: int, stage: int) -> bool:
        held = self.held[rank] + self.task.halved[stage] + self._owed(rank)
        return self.rules.split and held <= self.task.capacity[rank]

    def _pass_on(self, end: float, kind: int, stage: int, number: int) -> None:
        """What an action has made, to the stage that needs it."""
        if stage == len(self.task.stages):  # the last stage's own backward is next
            kind, stage = I, stage - 1
        if stage >= 0:
            self.made[kind][stage][number] = end
            rank = self.task.placement[stage]
            at = self._arrival(rank, kind, stage, number)
            heappush(self.heap, (max(at, self.free[rank]), rank))
