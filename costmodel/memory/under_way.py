"""Which messages a pipeline rank has in memory at each of its actions, beside those that it works
on: `runtime.messages.mailbox` counted on a schedule, without times.

What comes is asked for one action ahead of need, in the order of its sender. What has gone is kept
until the same peer sends something that it made after it needed that. A message between two stages
of one rank goes nowhere: it is kept until the other stage takes it.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from meshwright.costmodel.simulate.compiled_schedule import HELD, LAST, B, F, I, Table, W


class UnderWay(NamedTuple):
    """Messages of one stage on its rank while an action runs."""

    entries: int
    """Room for what its forwards will read."""
    gradients: int
    """Room for gradients of what it has sent."""
    sent: int
    """What its forwards have sent."""
    sent_back: int
    """Gradients of what it has read."""
    outlived: int
    """Micro-batches that it has where the stage before, of the same rank, has let them go."""


def under_way(table: Table, rank: int) -> Iterator[tuple[UnderWay, ...]]:
    """Yields, per action of the rank in order, what is there of each of its stages."""
    own = {stage: i for i, stage in enumerate(s for s, r in enumerate(table.owners) if r == rank)}
    place = _places(table, rank, own)
    queues = tuple(_queues(table, rank).values())
    room, there, none = ([[0] * width for _ in own] for width in (2, 2, 3))
    gone = defaultdict[int, list[int]](list)
    """Peer -> messages that it has not yet been seen to have, by the actions that made them."""
    handed = _Handed(table, own) if any([stage + 1 in own for stage in own]) else None
    units = table.units[rank]
    for unit, following in zip(units, [*units[1:], units[-1]], strict=True):
        for queue in queues:
            while queue and queue[-1][0] <= following[-1]:
                stage, back = place[queue.pop()[1]]
                room[stage][back] += 1
        for at in unit:
            source = table.items[at].source
            if source < 0:
                continue
            stage, back = place[at]
            room[stage][back] -= 1
            sent = gone[table.items[source].rank]
            for made_by in [one for one in sent if table.receivers[one] <= source]:
                sent.remove(made_by)
                stage, back = place[made_by]
                there[stage][back] -= 1
        if handed:
            for at in unit:
                handed.begins(at)
        now = tuple([
            UnderWay(entries, gradients, sent + out, sent_back + back, outlived)
            for (entries, gradients), (sent, sent_back), (out, back, outlived)
            in zip(room, there, handed.counts if handed else none, strict=True)
        ])  # fmt: skip
        for _ in unit:
            yield now
        for at in unit:
            if handed:
                handed.ends(at)
            receiver = table.receivers[at]
            if receiver >= 0:
                stage, back = place[at]
                there[stage][back] += 1
                gone[table.items[receiver].rank].append(at)


def _places(table: Table, rank: int, own: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Position of an action -> which stage of the rank it is of, and whether it is no forward."""
    found = {}
    for position in table.rows[rank]:
        _, stage, kind, *_ = table.items[position]
        found[position] = own[stage], int(kind & (HELD - 1) != F)
    return found


def _queues(table: Table, rank: int) -> dict[int, list[tuple[int, int]]]:
    """Peer -> messages from it, the first to come last: before which action each must have been
    asked for, and the action that needs it. Positions of one rank's actions are in their order."""
    found = defaultdict[int, list[tuple[int, int]]](list)
    for position in table.rows[rank]:
        source = table.items[position].source
        if source >= 0:
            found[table.items[source].rank].append((source, position))
    for peer, messages in found.items():
        messages.sort(reverse=True)
        # Whoever asks for one has asked for all that its sender has sent before.
        needed = [position for _, position in messages]
        found[peer] = list(zip(accumulate(needed, min), needed, strict=True))
    return found


class _Handed:
    """What the stages of one rank hand to each other."""

    def __init__(self, table: Table, own: dict[int, int]) -> None:
        self._table, self._own = table, own
        self.counts = [[0, 0, 0] for _ in own]
        """Of each stage: values that it has handed on, gradients that it has handed back, and
        `UnderWay.outlived`."""
        self._in_flight: set[tuple[int, int]] = set()
        self._outlived: set[tuple[int, int]] = set()

    def begins(self, position: int) -> None:
        """An action takes what it needs."""
        _, stage, kind, microbatch, *_ = self._table.items[position]
        if kind & 3 == F:
            self._in_flight.add((stage, microbatch))
            self._count(stage - 1, 0, -1)
        if kind & 3 in (B, I):
            self._count(stage + 1, 1, -1)
        later = stage + 1, microbatch
        # Its backward frees what it has saved from its last block on.
        if _ends_stay(kind) and later in self._in_flight:
            self._outlived.add(later)
            self._count(stage + 1, 2, 1)

    def ends(self, position: int) -> None:
        """An action leaves what it has made."""
        _, stage, kind, microbatch, *_ = self._table.items[position]
        if kind & 3 == F and stage + 1 in self._own:
            self._count(stage, 0, 1)
        if kind & 3 in (B, I) and stage - 1 in self._own:
            self._count(stage, 1, 1)
        if _ends_stay(kind):
            self._in_flight.discard((stage, microbatch))
            if (stage, microbatch) in self._outlived:
                self._outlived.remove((stage, microbatch))
                self._count(stage, 2, -1)

    def _count(self, stage: int, what: int, change: int) -> None:
        if stage in self._own:
            self.counts[self._own[stage]][what] += change


def _ends_stay(kind: int) -> bool:
    """Whether a micro-batch of the stage is through with such an action."""
    return kind & (LAST - 1) in (B, B + HELD, W)
