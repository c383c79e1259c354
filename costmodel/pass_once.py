"""The simulator where nothing is shared: one pass over the actions in the order of their needs."""

from itertools import chain

from meshwright.costmodel.program import IDLE, ChannelState, aged, play
from meshwright.costmodel.table import Table
from meshwright.costmodel.timeline import Ran, Times

_TOLERANCE = 1e-9
"""Messages that overlap by less, relative to the step, do not meet."""


def run_pass(table: Table, times: Times) -> Ran | None:
    """When everything runs; None if messages meet at a port, so that their order matters."""
    ran, messages = _Pass(table, times).run()
    return None if _meet(table, messages, max(ran.ends)) else ran


class _Pass:
    def __init__(self, table: Table, times: Times) -> None:
        self.table, self.times = table, times
        self.played: dict[tuple[int, int, ChannelState], tuple[float, ChannelState]] = {}
        plain: list[float] = []
        for programs in times.programs:
            plain += [-1.0 if p.uses_channel else p.own_s for p in programs]
        self.plain = plain
        """By stage and kind: seconds of an action that leaves an idle channel idle; else -1."""

    def run(self) -> tuple[Ran, list[list[tuple[float, float]]]]:
        table, send_s = self.table, self.times.send_s
        free = list(self.times.offsets)
        posted = list(self.times.offsets)
        carried = [0.0] * len(table.pairs)
        messages: list[list[tuple[float, float]]] = [[] for _ in table.pairs]
        channels = [IDLE] * len(free)
        starts, ends = [0.0] * len(table.items), [0.0] * len(table.items)
        plain = self.plain
        for position, (rank, stage, kind, _, source, border, pair) in enumerate(table.items):
            start = free[rank]
            if source >= 0:
                # It goes when it is made and asked for, after those before it.
                arrives = ends[source]
                if arrives < posted[rank]:
                    arrives = posted[rank]
                if seconds := send_s[border]:
                    begin = arrives if arrives > carried[pair] else carried[pair]
                    arrives = carried[pair] = begin + seconds
                    messages[pair].append((begin, arrives))
                posted[rank] = start
                if arrives > start:
                    start = arrives
            else:
                posted[rank] = start
            seconds = plain[8 * stage + kind]
            if seconds < 0.0 or channels[rank] is not IDLE:
                seconds = self._play(channels, rank, stage, kind, start - free[rank])
            starts[position] = start
            ends[position] = free[rank] = start + seconds
        return Ran(starts, ends, channels), messages

    def _play(
        self, channels: list[ChannelState], rank: int, stage: int, kind: int, idle_s: float
    ) -> float:
        """Seconds of an action beside a channel at work, whose state it changes."""
        state = aged(channels[rank], idle_s)
        key = stage, kind, state
        found = self.played.get(key)
        if found is None:
            program, overlap = self.times.programs[stage][kind], self.times.overlaps[stage]
            seconds, left = play(program.steps, state, overlap)
            found = self.played[key] = seconds, left if left[0] > 0.0 else IDLE
        channels[rank] = found[1]
        return found[0]


def _meet(table: Table, messages: list[list[tuple[float, float]]], step_s: float) -> bool:
    """Whether two messages of different pairs of ranks use one port at the same time."""
    ports: dict[tuple[int, bool], list[int]] = {}
    for number, (source, target) in enumerate(table.pairs):
        ports.setdefault((source, False), []).append(number)
        ports.setdefault((target, True), []).append(number)
    for pairs in ports.values():
        if len(pairs) > 1 and _overlap([messages[p] for p in pairs], _TOLERANCE * step_s):
            return True
    return False


def _overlap(messages: list[list[tuple[float, float]]], slack_s: float) -> bool:
    """Whether any two spans overlap; each list is in order."""
    spans = sorted(chain.from_iterable(messages))
    ends = 0.0
    for begin, end in spans:
        if begin < ends - slack_s:
            return True
        if end > ends:
            ends = end
    return False
