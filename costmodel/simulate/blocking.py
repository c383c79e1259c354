"""The simulator where messages keep both ends waiting: a rank computes nothing while it sends what
it has made or gets what it needs, and does one after the other.

After an action a rank stands between two: its message goes once the other end stands before the
action that needs it, and its next action begins once what that needs is there and its own has gone.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from meshwright.costmodel.comm.ports import moments_per_s
from meshwright.costmodel.simulate.compiled_schedule import NUM_KINDS, Table
from meshwright.costmodel.simulate.timeline import Logged, Ran, Times
from meshwright.costmodel.stage.program import IDLE, aged, play
from meshwright.ir.errors import PlanError


def run_blocking(table: Table, times: Times) -> Ran:
    """When everything runs, with a log; PlanError where ranks would wait for each other for ever,
    and for what has no price beside such messages: actions that run together, and copies to the
    host."""
    if table.together:
        raise PlanError(
            f"schedule {table.schedule.name!r} runs two actions at once, and messages of this "
            "stack keep both ends waiting; nearest is dual_pipe_v"
        )
    if any(times.offload_s):
        raise PlanError(
            "saved: what blocks keep goes to the host, which has no price where messages of the "
            "stack keep both ends waiting; nearest is saved=none"
        )
    return _Blocking(table, times).run()


class _Blocking:
    def __init__(self, table: Table, times: Times) -> None:
        self.table, self.times = table, times
        count = len(table.items)
        self.ran = Ran.of(table)
        self.met = [-1.0] * count
        """When the first of both ends of the message for an action stood ready."""
        self.arrived = [-1.0] * count
        self.ready: list[tuple[int, int, float]] = []
        """Messages: (moment, position of the action that needs it, time)."""
        self.per_s = moments_per_s(times)

    def run(self) -> Ran:
        table, lanes_s = self.table, self.times.lanes_s
        ranks = [self._run(rank) for rank in range(len(table.rows))]
        busy = list(self.times.offsets)
        left = sum([next(rank, True) is None for rank in ranks])
        while self.ready:
            _, position, time = heappop(self.ready)
            item = table.items[position]
            ends = table.pairs[item.pair]
            begun = max(time, *(busy[end] for end in ends))
            time = begun + lanes_s[item.lane]
            what = str(table.action(position))
            self.ran.log.append(Logged(ends[1], "message", what, begun, time))
            for end in ends:
                busy[end] = time
            self.arrived[position] = time
            left -= sum([next(ranks[end], False) is True for end in ends])
        if left:
            raise PlanError(
                f"schedule {table.schedule.name!r} hangs where sends wait for who receives them; "
                "use one_f_one_b or gpipe"
            )
        return self.ran

    def _run(self, rank: int) -> Iterator[bool | None]:
        """The actions of a rank: yields where it has to wait, and True once when it is done."""
        starts, ends, arrived = self.ran.starts, self.ran.ends, self.arrived
        free, channel, sent = self.times.offsets[rank], IDLE, -1
        for position, code, needs, _, receiver in self.table.turns[rank]:
            if needs:
                self._stand(position, free)
            while (sent >= 0 and arrived[sent] < 0.0) or (needs and arrived[position] < 0.0):
                yield None
            start = max(
                free, arrived[position] if needs else 0.0, arrived[sent] if sent >= 0 else 0.0
            )
            stage, kind = divmod(code, NUM_KINDS)
            steps, overlap = self.times.programs[stage][kind].steps, self.times.overlaps[stage]
            seconds, left = play(steps, aged(channel, start - free), overlap)
            channel = left if left[0] > 0.0 else IDLE
            starts[position] = start
            ends[position] = free = start + seconds
            if steps:
                self.ran.log.append(Logged(rank, "compute", steps[0].what, start, free))
            sent = receiver
            if receiver >= 0:
                self._stand(receiver, free)
        self.ran.channels[rank] = channel
        yield True

    def _stand(self, position: int, time: float) -> None:
        """One end of a message stands ready."""
        if (first := self.met[position]) < 0.0:
            self.met[position] = time
        else:
            time = max(first, time)
            heappush(self.ready, (int(time * self.per_s + 0.5), position, time))
