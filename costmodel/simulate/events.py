"""The simulator where things are shared: events in order of time.

Where processes outnumber cores, all that run at a time are slowed alike (processor sharing): a
virtual clock runs at the speed that they proceed with, so that ends in it need not be changed.
What a rank computes and what its channel carries slow each other down by the factors of the link.
Collectives that a rank waits for take what they took with everybody at it, and where cores are
shared they are work to others as computing is.
"""

from heapq import heappop, heappush

from meshwright.costmodel.comm.ports import Ports
from meshwright.costmodel.simulate.compiled_schedule import NUM_KINDS, B, F, I, Item, Table
from meshwright.costmodel.simulate.rank_state import ChannelJob, Process, RankState
from meshwright.costmodel.simulate.timeline import Logged, Ran, Times
from meshwright.costmodel.stage.program import SCATTER, Do, Program, Step


def run_events(table: Table, times: Times, *, detail: bool) -> Ran:
    """When everything runs."""
    return _Events(table, times, detail).run()


_WAKE, _ARRIVE, _JOB, _DEMAND, _SEND = range(5)


class _Events:
    """The state of one simulation."""

    def __init__(self, table: Table, times: Times, detail: bool) -> None:
        self.table, self.times, self.detail = table, times, detail
        self.ran = Ran.of(table)
        self.now = self.virtual = self.active = 0.0
        self.speed = 1.0
        self.cpu: list[tuple[float, int, int]] = []
        """(virtual end, pipeline rank, version)."""
        self.real: list[tuple[float, int, int, int, float]] = []
        """(time, number, kind, rank or position, version or demand)."""
        self.number = 0
        self.ports = Ports(table, times)
        self.arrived: set[int] = set()
        self.waiting: dict[int, RankState] = {}
        self.copies: dict[tuple[int, int], float] = {}
        """(stage, micro-batch) -> when what it offloads has left."""
        self.fetched: dict[int, float] = {}
        """Position of a backward -> when its bytes are back."""
        self.ranks = [RankState(n) for n in range(len(table.rows))]
        self.to_host, self.to_device = [0.0] * len(table.rows), [0.0] * len(table.rows)

    def run(self) -> Ran:
        for rank in self.ranks:
            rank.process = self._process(rank)
            next(rank.process, None)
        while True:
            while self.cpu and self.cpu[0][2] != self.ranks[self.cpu[0][1]].run_version:
                heappop(self.cpu)
            if not self.cpu and not self.real:
                return self.ran
            ends = float("inf")
            if self.cpu:
                ends = max(self.now, self.now + (self.cpu[0][0] - self.virtual) / self.speed)
            if self.real and self.real[0][0] <= ends:
                at, _, kind, which, value = heappop(self.real)
                self.virtual += (at - self.now) * self.speed
                self.now = at
                self._event(kind, which, value)
            else:
                self.virtual, number, _ = heappop(self.cpu)
                self.now = ends
                self._stop_run(self.ranks[number])

    def _event(self, kind: int, which: int, value: float) -> None:
        if kind == _WAKE:
            next(self.ranks[which].process, None)
        elif kind == _ARRIVE:
            self.arrived.add(which)
            if (rank := self.waiting.pop(which, None)) is not None:
                next(rank.process, None)
        elif kind == _DEMAND:
            self._demand(value)
        elif kind == _SEND:
            self._send(which, value)
        elif value == self.ranks[which].channel_version:
            self._end_job(self.ranks[which])

    def _at(self, time: float, kind: int, which: int, value: float = 0.0) -> None:
        self.number += 1
        heappush(self.real, (time, self.number, kind, which, value))

    def _demand(self, cores: float) -> None:
        """More (or less) work on the cores that all share."""
        self.active += cores
        limit = self.times.cores
        self.speed = 1.0 if self.active <= limit else limit / self.active

    def _log(self, rank: int, channel: str, what: str, start_s: float, end_s: float) -> None:
        if self.detail:
            self.ran.log.append(Logged(rank, channel, what, start_s, end_s))

    # What a rank does.

    def _process(self, rank: RankState) -> Process:
        row = self.table.rows[rank.number]
        if offset := self.times.offsets[rank.number]:
            # It is still at the end of the step before, on the cores that others begin on.
            busy = self.times.processes[self.table.items[row[0]].stage]
            self._demand(busy)
            self._at(offset, _WAKE, rank.number)
            yield
            self._demand(-busy)
        self._ask(row[0])
        units = self.table.units[rank.number]
        for unit, following in zip(units, [*units[1:], ()], strict=True):
            for ahead in following:
                self._ask(ahead)  # one ahead of need
            for position in unit:
                item = self.table.items[position]
                if item.source >= 0 and position not in self.arrived:
                    self.waiting[position] = rank
                    yield
                yield from self._fetch(rank, position, item)
            item = self.table.items[unit[0]]
            self.ran.starts[unit[0]] = self.now
            rank.processes = self.times.processes[item.stage]
            rank.overlap = self.times.overlaps[item.stage]
            yield from self._play(rank, self._program(unit).steps)
            for position in unit[1:]:
                self.ran.starts[position] = self.now
            for position in unit:
                self._end_action(position, self.table.items[position])
        self._settle(rank)
        self.ran.channels[rank.number] = rank.state()

    def _program(self, unit: tuple[int, ...]) -> Program:
        """What an action does, or two together."""
        items = [self.table.items[position] for position in unit]
        if len(items) == 1:
            return self.times.programs[items[0].stage][items[0].kind]
        first, second = (NUM_KINDS * item.stage + item.kind for item in items)
        return self.times.pairs[first, second]

    def _end_action(self, position: int, item: Item) -> None:
        self.ran.ends[position] = self.now
        if (receiver := self.table.receivers[position]) >= 0:
            self._request(receiver)
        copy_s = self.times.offload_s[item.stage]
        if item.kind == F and copy_s:  # what K makes stays
            begin = max(self.now, self.to_host[item.rank])
            gone = self.to_host[item.rank] = begin + copy_s
            self.copies[item.stage, item.microbatch] = self.ran.gone[position] = gone
            self._log(item.rank, "to_host", f"{item.stage}F{item.microbatch}", begin, gone)

    def _play(self, rank: RankState, steps: tuple[Step, ...]) -> Process:
        marks: dict[int, float] = {}
        for do, seconds, job, what in steps:
            if do == Do.RUN:
                if seconds > 0.0:
                    begun = self.now
                    self._start_run(rank, seconds)
                    yield
                    self._log(rank.number, "compute", what, begun, self.now)
            elif do == Do.TALK:
                if seconds > 0.0:
                    yield from self._talk(rank, seconds, what)
            elif do == Do.START:
                self._start_job(rank, seconds, what)
                marks[job] = rank.total
                if job == SCATTER:
                    rank.previous, rank.newest = rank.newest, rank.total
            else:
                mark = marks.get(job, 0.0) if do == Do.WAIT else rank.total
                if do == Do.WAIT_SCATTER:
                    mark = rank.previous
                if mark > rank.done:
                    rank.waits_for = mark
                    yield

    def _talk(self, rank: RankState, seconds: float, what: str) -> Process:
        demand = rank.processes  # as computing is
        self._log(rank.number, "compute", what, self.now, self.now + seconds)
        self._demand(demand)
        self._at(self.now + seconds, _WAKE, rank.number)
        yield
        self._demand(-demand)

    # Messages and copies.

    def _ask(self, position: int) -> None:
        """Post the receive of an action, and fetch what it needs from the host."""
        item = self.table.items[position]
        if item.source >= 0:
            self._request(position)
        self._bring_back(position, item)

    def _request(self, position: int) -> None:
        """Goes when it has been both asked for and made."""
        if not self.ports.met(position):
            return
        if self.times.lanes_s[self.table.items[position].lane]:
            turn = self.ports.turn_s(self.now)
            heappush(self.real, (turn, position, _SEND, position, self.now))
        else:
            self._at(self.now, _ARRIVE, position)

    def _send(self, position: int, ready: float) -> None:
        begin, end = self.ports.send(position, ready)
        self._at(max(end, self.now), _ARRIVE, position)
        source, target = self.table.pairs[self.table.items[position].pair]
        self._log(target, "message", str(self.table.action(position)), begin, end)
        demand = self.times.talking * (self.ranks[source].processes + self.ranks[target].processes)
        if demand:
            self._at(max(begin, self.now), _DEMAND, 0, demand)
            self._at(max(end, self.now), _DEMAND, 0, -demand)

    def _bring_back(self, position: int, item: Item) -> None:
        gone = self.copies.get((item.stage, item.microbatch))
        if gone is None or item.kind & 3 not in (B, I) or position in self.fetched:
            return
        begin = max(self.now, gone, self.to_device[item.rank])
        end = begin + self.times.offload_s[item.stage]
        self.to_device[item.rank] = self.fetched[position] = end
        self.ran.back[position] = begin
        self._log(item.rank, "to_device", str(self.table.action(position)), begin, end)

    def _fetch(self, rank: RankState, position: int, item: Item) -> Process:
        """Wait until what the action's forward offloaded is back."""
        self._bring_back(position, item)
        back = self.fetched.get(position, 0.0)
        if back > self.now:
            self._at(back, _WAKE, rank.number)
            yield

    # Computing and the channel, which slow each other down.

    def _start_run(self, rank: RankState, seconds: float) -> None:
        self._settle(rank)
        rank.running, rank.run_left = True, seconds
        self._demand(rank.processes)
        self._reckon(rank)

    def _stop_run(self, rank: RankState) -> None:
        self._settle(rank)
        rank.running, rank.run_left = False, 0.0
        rank.run_version += 1
        self._demand(-rank.processes)
        self._reckon(rank)
        next(rank.process, None)

    def _start_job(self, rank: RankState, seconds: float, what: str) -> None:
        rank.total += seconds
        if seconds <= 0.0:
            return
        rank.jobs.append(ChannelJob(seconds, rank.total, what))
        if len(rank.jobs) == 1:
            self._settle(rank)
            self._demand(self.times.talking * rank.processes)
            self._begin_job(rank)

    def _begin_job(self, rank: RankState) -> None:
        rank.channel_left, rank.begun_s = rank.jobs[0].seconds, self.now
        self._reckon(rank)

    def _end_job(self, rank: RankState) -> None:
        self._settle(rank)
        job = rank.jobs.popleft()
        rank.done = job.mark
        self._log(rank.number, "channel", job.what, rank.begun_s, self.now)
        if rank.jobs:
            self._begin_job(rank)
        else:
            self._demand(-self.times.talking * rank.processes)
            rank.channel_version += 1
            self._reckon(rank)
        if rank.waits_for is not None and rank.done >= rank.waits_for:
            rank.waits_for = None
            next(rank.process, None)

    def _settle(self, rank: RankState) -> None:
        """Write off what has been done since the last time."""
        if rank.running:
            rank.run_left -= (self.virtual - rank.run_from) / rank.run_factor
        if rank.jobs:
            rank.channel_left -= (self.now - rank.channel_from) / rank.channel_factor
        rank.run_from, rank.channel_from = self.virtual, self.now

    def _reckon(self, rank: RankState) -> None:
        """Ends under the slowdown of now."""
        if rank.running:
            rank.run_factor = rank.overlap.compute if rank.jobs else 1.0
            rank.run_version += 1
            end = self.virtual + rank.run_left * rank.run_factor
            heappush(self.cpu, (end, rank.number, rank.run_version))
        if rank.jobs:
            rank.channel_factor = rank.overlap.channel if rank.running else 1.0
            rank.channel_version += 1
            at = self.now + max(rank.channel_left, 0.0) * rank.channel_factor
            self._at(at, _JOB, rank.number, rank.channel_version)
