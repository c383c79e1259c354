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


class _Awaited(NamedTuple):
    """A message that a peer has sent, by the numbers of actions in the two rows."""

    made_at: int
    needed_at: int


def under_way(table: Table, rank: int) -> Iterator[tuple[UnderWay, ...]]:
    """Yields, per action of the rank in order, what is there of each of its stages."""
    row = table.rows[rank]
    own = {stage: i for i, stage in enumerate(s for s, r in enumerate(table.owners) if r == rank)}
    number = _numbers(table)
    arriving = defaultdict[int, list[_Awaited]](list)
    for at, position in enumerate(row):
        source = table.items[position].source
        if source >= 0:
            arriving[table.items[source].rank].append(_Awaited(number[source], at))
    asked_by = {peer: _stops(found, len(row)) for peer, found in arriving.items()}
    queues = {peer: sorted(found) for peer, found in arriving.items()}
    done = dict.fromkeys(arriving, 0)
    room = [[0, 0] for _ in own]
    gone = defaultdict[int, list[tuple[int, int, int]]](list)
    """Peer -> what it has not yet been seen to have: when it needs it, stage and kind."""
    there = [[0, 0] for _ in own]

    def place(position: int) -> tuple[int, int]:
        """Which stage of the rank an action is of, and whether it is no forward."""
        item = table.items[position]
        return own[item.stage], int(item.kind & (HELD - 1) != F)

    handed = _Handed(table, own)
    units = _units(table, row)
    for unit, following in zip(units, [*units[1:], units[-1]], strict=True):
        for peer, queue in queues.items():
            stop = asked_by[peer][following[-1]]
            for message in queue[done[peer] : stop]:
                stage, back = place(row[message.needed_at])
                room[stage][back] += 1
            done[peer] = max(done[peer], stop)
        for at in unit:
            source = table.items[row[at]].source
            if source < 0:
                continue
            stage, back = place(row[at])
            room[stage][back] -= 1
            peer, made_at = table.items[source].rank, number[source]
            kept = []
            for needed_at, stage, back in gone[peer]:
                if needed_at <= made_at:
                    there[stage][back] -= 1
                else:
                    kept.append((needed_at, stage, back))
            gone[peer] = kept
        for at in unit:
            handed.begins(row[at])
        now = tuple([
            UnderWay(entries, gradients, sent + out, sent_back + back, outlived)
            for (entries, gradients), (sent, sent_back), (out, back, outlived)
            in zip(room, there, handed.counts, strict=True)
        ])  # fmt: skip
        for _ in unit:
            yield now
        for at in unit:
            handed.ends(row[at])
            receiver = table.receivers[row[at]]
            if receiver >= 0:
                stage, back = place(row[at])
                there[stage][back] += 1
                gone[table.items[receiver].rank].append((number[receiver], stage, back))


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


def _numbers(table: Table) -> dict[int, int]:
    """Position of an action -> its number in the row of its rank."""
    return {position: at for row in table.rows for at, position in enumerate(row)}


def _stops(messages: list[_Awaited], actions: int) -> list[int]:
    """Per action, how many messages of one peer must have been asked for by then."""
    found = [0] * actions
    for count, message in enumerate(sorted(messages), start=1):
        found[message.needed_at] = max(found[message.needed_at], count)
    return list(accumulate(found, max))


def _units(table: Table, row: tuple[int, ...]) -> list[range]:
    """Numbers of actions that run together."""
    return [
        range(at, at + 1 + (position in table.together))
        for at, position in enumerate(row)
        if position - 1 not in table.together
    ]
