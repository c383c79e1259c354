"""The simulator where ranks share nothing but ports: each runs ahead until it needs a message.

Messages go in the order in which they are ready (`costmodel.comm.ports`). A rank that waits makes
none that is ready before the first of those that are: so no clock is needed, and no event but
these.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from meshwright.costmodel.comm.ports import moments_per_s
from meshwright.costmodel.simulate.compiled_schedule import NUM_KINDS, Table
from meshwright.costmodel.simulate.timeline import Ran, Times
from meshwright.costmodel.stage.program import IDLE, ChannelState, aged, play


def run_ahead(table: Table, times: Times) -> Ran:
    """When everything runs."""
    return _Ahead(table, times).run()


class _Ahead:
    def __init__(self, table: Table, times: Times) -> None:
        self.table, self.times = table, times
        count = len(table.items)
        self.ran = Ran.of(table)
        self.played: dict[tuple[int, ChannelState], tuple[float, ChannelState]] = {}
        self.pairs: dict[tuple[tuple[int, int], ChannelState], tuple[float, ChannelState]] = {}
        plain: list[float] = []
        for programs in times.programs:
            plain += [-1.0 if p.uses_channel else p.own_s for p in programs]
        self.plain = plain
        """By stage and kind: seconds of an action that leaves an idle channel idle; else -1."""
        self.met = [-1.0] * count
        """When the message for an action was made or asked for, whichever was first."""
        self.arrived = [-1.0] * count
        self.waits_at = [-1] * len(table.rows)
        """Pipeline rank -> the action that it cannot begin."""
        self.ready: list[tuple[int, int, float]] = []
        """Messages: (moment, position of the action that needs it, time)."""
        self.per_s = moments_per_s(times)
        for row, offset in zip(table.rows, times.offsets, strict=True):
            self.met[row[0]] = offset

    def run(self) -> Ran:
        table, lanes_s = self.table, self.times.lanes_s
        run = self._run_units if table.together else self._run
        ranks = [run(rank) for rank in range(len(table.rows))]
        sending, getting = [0.0] * len(ranks), [0.0] * len(ranks)
        for rank in ranks:
            next(rank, None)
        ready, arrived, waits_at, routes = self.ready, self.arrived, self.waits_at, table.routes
        while ready:
            _, position, time = heappop(ready)
            source, target, lane = routes[position]
            if seconds := lanes_s[lane]:
                if sending[source] > time:
                    time = sending[source]
                if getting[target] > time:
                    time = getting[target]
                time += seconds
                sending[source] = getting[target] = time
            arrived[position] = time
            if waits_at[target] == position:
                next(ranks[target], None)
        return self.ran

    def _run(self, rank: int) -> Iterator[None]:
        """The actions of a rank; it stops where a message is missing."""
        plain, arrived, met, ready = self.plain, self.arrived, self.met, self.ready
        starts, ends, per_s = self.ran.starts, self.ran.ends, self.per_s
        free, channel = self.times.offsets[rank], IDLE
        for position, code, needs, ahead, receiver in self.table.turns[rank]:
            if ahead >= 0:  # ask for what the next action needs
                if (first := met[ahead]) < 0.0:
                    met[ahead] = free
                else:
                    time = first if first > free else free
                    heappush(ready, (int(time * per_s + 0.5), ahead, time))
            start = free
            if needs:
                if arrived[position] < 0.0:
                    self.waits_at[rank] = position
                    yield
                if arrived[position] > free:
                    start = arrived[position]
            seconds = plain[code]
            if seconds < 0.0 or channel is not IDLE:
                seconds, channel = self._play(code, aged(channel, start - free))
            starts[position] = start
            ends[position] = free = start + seconds
            if receiver >= 0:  # hand over what has been made
                if (first := met[receiver]) < 0.0:
                    met[receiver] = free
                else:
                    time = first if first > free else free
                    heappush(ready, (int(time * per_s + 0.5), receiver, time))
        self.ran.channels[rank] = channel

    def _run_units(self, rank: int) -> Iterator[None]:
        """The same where some actions run together: both wait for what either needs."""
        items, ran, receivers = self.table.items, self.ran, self.table.receivers
        free, channel = self.times.offsets[rank], IDLE
        units = self.table.units[rank]
        for unit, following in zip(units, [*units[1:], ()], strict=True):
            for ahead in following:
                if items[ahead].source >= 0:
                    self._meet(ahead, free)
            start = free
            for position in unit:
                if items[position].source >= 0:
                    if self.arrived[position] < 0.0:
                        self.waits_at[rank] = position
                        yield
                    start = max(start, self.arrived[position])
            codes = [NUM_KINDS * items[p].stage + items[p].kind for p in unit]
            state = aged(channel, start - free)
            if len(unit) == 1:
                seconds, channel = self._play(codes[0], state)
            else:
                seconds, channel = self._play_pair((codes[0], codes[1]), state)
            ran.starts[unit[0]], free = start, start + seconds
            ran.ends[unit[0]] = free
            for position in unit[1:]:
                ran.starts[position] = ran.ends[position] = free
            for position in unit:
                if receivers[position] >= 0:
                    self._meet(receivers[position], free)
        ran.channels[rank] = channel

    def _meet(self, position: int, now: float) -> None:
        """A message has been made or asked for: it is ready when both are done."""
        if (first := self.met[position]) < 0.0:
            self.met[position] = now
        else:
            time = max(first, now)
            heappush(self.ready, (int(time * self.per_s + 0.5), position, time))

    def _play_pair(self, codes: tuple[int, int], state: ChannelState) -> tuple[float, ChannelState]:
        """`_play` of two actions that run together."""
        found = self.pairs.get((codes, state))
        if found is None:
            overlap = self.times.overlaps[codes[0] // NUM_KINDS]
            seconds, left = play(self.times.pairs[codes].steps, state, overlap)
            found = self.pairs[codes, state] = seconds, left if left[0] > 0.0 else IDLE
        return found

    def _play(self, code: int, state: ChannelState) -> tuple[float, ChannelState]:
        """(seconds of an action beside a channel at work, what it leaves)."""
        found = self.played.get((code, state))
        if found is None:
            stage, kind = divmod(code, NUM_KINDS)
            program, overlap = self.times.programs[stage][kind], self.times.overlaps[stage]
            seconds, left = play(program.steps, state, overlap)
            found = self.played[code, state] = seconds, left if left[0] > 0.0 else IDLE
        return found
