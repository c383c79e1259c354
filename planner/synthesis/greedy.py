"""List scheduling in true times: each rank takes, of what it can start, what is due first.

An action of micro-batch m is due when it would run if a micro-batch followed the other at the
period of the busiest rank and nobody waited. What is due later may be put off (`Rules`). Forwards
wait for memory; a backward is taken whole where its halves would hold too much.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import ceil

from meshwright.costmodel.simulate.compiled_schedule import B, F, I, W
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


def list_schedule(
    task: Task, rules: Rules, limit_s: float = _NEVER
) -> tuple[float, list[Row]] | None:
    """(seconds, rows); None, mostly soon, where it takes longer than the limit."""
    made = _Greedy(task, rules, limit_s)
    made.run()
    assert made.is_over or not made.left, "the oldest micro-batch can always go on"
    return None if made.is_over else (max(made.free), made.rows)


class _Greedy:
    """One list schedule in the making."""

    def __init__(self, task: Task, rules: Rules, limit_s: float) -> None:
        self.task, self.rules = task, rules
        self.limit_s, self.is_over = limit_s * (1 + 1e-9), False
        """A limit, with room for sums in another order."""
        whole = [min(s[B], s[I] + s[W]) for s in task.seconds]
        self.done_s = [
            {F: s[F], B: back, I: back - s[W], W: s[W]}
            for s, back in zip(task.seconds, whole, strict=True)
        ]
        """Per stage and kind, by how much an action shortens what is left at the least."""
        self.left_s = [
            task.num_microbatches * sum(task.seconds[s][F] + whole[s] for s in own)
            for own in task.held
        ]
        count, num_stages = task.num_microbatches, len(task.stages)
        busy = [sum(task.seconds[s][F] + task.seconds[s][B] for s in own) for own in task.held]
        self.base_s = max(busy)
        self.period_s = self.base_s * rules.period
        forward, backward = way_s(task)
        put_off = min(rules.delay, _LATEST) * self.base_s
        self.due_forward, self.due_input = forward, backward
        self.due_weight = tuple(
            b + s[I] + put_off for b, s in zip(backward, task.seconds, strict=True)
        )
        moves = max(sum(task.seconds[s][F] + task.seconds[s][I] for s in own) for own in task.held)
        self.most_ahead = [
            count
            if rules.lead is None
            else max(1, ceil((b + s[I] - f) / moves - 1e-9) + rules.lead)
            for f, b, s in zip(forward, backward, task.seconds, strict=True)
        ]
        """Per stage, forwards ahead of backwards: one even of a stage that takes no time."""
        self.forwards, self.inputs, self.weights = ([0] * num_stages for _ in range(3))
        """Per stage, how many have been taken; weight halves that are part of whole backwards are
        counted when the next one is looked for."""
        self.split = [[False] * count for _ in range(num_stages)]
        """Of each backward that has begun, whether it is in halves."""
        self.from_before, self.from_next = (0.0, *task.sends_s[:-1]), task.sends_s
        """Per stage, seconds of a message of a forward and of a backward to it."""
        self.made_forward, self.made_input = (
            [[_NEVER] * count for _ in range(num_stages)] for _ in range(2)
        )
        """When what a forward or backward needs of its neighbour is there to be sent."""
        self.made_forward[0] = [0.0] * count
        self.saved = [stage.saved_bytes for stage in task.stages]
        self.free = list(task.release)
        self.asked = list(task.release)
        """A rank asks for a message when it starts the action before."""
        self.capacity = task.capacity
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
        # Before the moves: whether these find memory depends on which weight halves are over.
        weights = self._weights(rank)
        ready, soonest = self._moves(now, rank)
        patient = not ready
        ready += weights
        if ready:
            _, kind, stage, number = min(ready)
            if not patient or not self._is_late(now, stage, soonest):
                self._take(now, rank, kind, stage, number)
                return
        if soonest < _NEVER:
            heappush(self.heap, (soonest, rank))

    def _weights(self, rank: int) -> list[tuple[float, int, int, int]]:
        """The weight half that is next of each stage, by due date; none of a stage whose next input
        half is not over. It is called for each action, as is `_moves`, and both call little."""
        found, inputs, weights, period_s = [], self.inputs, self.weights, self.period_s
        for stage in self.task.held[rank]:
            number, over = weights[stage], inputs[stage]
            if number < over:
                split = self.split[stage]
                while number < over and not split[number]:
                    number += 1
                weights[stage] = number
                if number < over:
                    found.append((number * period_s + self.due_weight[stage], W, stage, number))
        return found

    def _is_late(self, now: float, stage: int, soonest: float) -> bool:
        """Whether a weight half would keep waiting what is known to come."""
        return now + self.task.seconds[stage][W] * (1 - self.rules.late) > soonest

    def _moves(self, now: float, rank: int) -> tuple[list[tuple[float, int, int, int]], float]:
        """Forwards and backwards that can start now, by due date, and when the next one can."""
        ready, soonest = [], _NEVER
        inputs, forwards = self.inputs, self.forwards
        count, period_s, asked = self.task.num_microbatches, self.period_s, self.asked[rank]
        for stage in self.task.held[rank]:
            number = inputs[stage]
            if number < count:
                at, send_s = self.made_input[stage][number], self.from_next[stage]
                if send_s:
                    at = (at if at > asked else asked) + send_s
                if at <= now:
                    ready.append((number * period_s + self.due_input[stage], I, stage, number))
                elif at < soonest:
                    soonest = at
            number = forwards[stage]
            if number < count:
                at, send_s = self.made_forward[stage][number], self.from_before[stage]
                if send_s:
                    at = (at if at > asked else asked) + send_s
                if at <= now:
                    if self._fits(rank, stage):
                        due_s = number * period_s + self.due_forward[stage]
                        ready.append((due_s, F, stage, number))
                elif at < soonest and self._fits(rank, stage):
                    soonest = at
        return ready, soonest

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether a forward finds memory."""
        begun = self.forwards[stage]
        if begun - self.inputs[stage] >= self.most_ahead[stage]:
            return False
        capacity = self.capacity[rank]
        if capacity == _NEVER:
            return True
        room = capacity - self.held[rank] - self.saved[stage]
        if room < 0:
            return False
        own = self.task.held[rank]
        if len(own) == 1:  # it owes nothing else
            return begun + 1 == self.task.num_microbatches or self.saved[stage] <= capacity
        oldest = min([self.weights[s] for s in own])
        owed = self._owed(rank, oldest, stage if oldest == begun else -1)
        return room >= owed and self._lets_on(rank, stage)

    def _lets_on(self, rank: int, stage: int) -> bool:
        """Whether after a forward of the stage the first micro-batch that the rank has not taken
        through all its stages finds memory, once those before it are gone."""
        forwards, saved = self.forwards, self.saved
        own = self.task.held[rank]
        begun = [forwards[s] + (s == stage) for s in own]
        first = min(begun)
        if first == self.task.num_microbatches:
            return True
        held = 0.0
        for s, count in zip(own, begun, strict=True):
            held += saved[s] * (count - first if count > first else 1)
        return held <= self.capacity[rank]

    def _owed(self, rank: int, oldest: int, but: int = -1) -> float:
        """Bytes that the oldest micro-batch, the first that the rank is not done with, will still
        take, stage `but` left out. They are kept for it: so it always comes to its end, and no rank
        waits for ever."""
        owed, forwards, saved = 0.0, self.forwards, self.saved
        for stage in self.task.held[rank]:
            if stage != but and forwards[stage] <= oldest:
                owed += saved[stage]
        return owed

    def _take(self, now: float, rank: int, kind: int, stage: int, number: int) -> None:
        if kind == I and not self._halves(rank, stage):
            kind = B
        end = now + self.task.seconds[stage][kind]
        left_s = self.left_s[rank] = self.left_s[rank] - self.done_s[stage][kind]
        if end + left_s > self.limit_s:
            self.is_over = True
            self.heap.clear()
            return
        self.asked[rank], self.free[rank] = now, end
        self.rows[rank].append((stage, kind))
        if kind == F:
            self.left -= 1
            self.held[rank] += self.saved[stage]
            self.forwards[stage] += 1
            if stage + 1 < len(self.saved):
                self._pass_on(end, F, stage + 1, number)
            else:  # the last stage's own backward is next
                self._pass_on(end, I, stage, number)
        elif kind == W:
            self.left -= 1
            self.weights[stage] += 1
            self.held[rank] -= self.saved[stage] + self.task.halved[stage]
        else:
            self.inputs[stage] += 1
            if kind == I:
                self.split[stage][number] = True
                self.held[rank] += self.task.halved[stage]
            else:
                self.left -= 1
                self.held[rank] -= self.saved[stage]
            if stage:
                self._pass_on(end, I, stage - 1, number)
        heappush(self.heap, (end, rank))

    def _halves(self, rank: int, stage: int) -> bool:
        if not self.rules.split:
            return False
        oldest = min([self.weights[s] for s in self.task.held[rank]])
        held = self.held[rank] + self.task.halved[stage] + self._owed(rank, oldest)
        return held <= self.task.capacity[rank]

    def _pass_on(self, end: float, kind: int, stage: int, number: int) -> None:
        """What an action has made, to the stage that needs it."""
        forward = kind == F
        (self.made_forward if forward else self.made_input)[stage][number] = end
        send_s = (self.from_before if forward else self.from_next)[stage]
        rank = self.task.placement[stage]
        at = max(end, self.asked[rank]) + send_s if send_s else end
        heappush(self.heap, (max(at, self.free[rank]), rank))
