"""The ports that messages go through: each carries one at a time, in the order they are ready.

A rank has a port for what it sends and one for what it gets. Of a message both must be free. Equal
stages make messages ready at equal times: those go in the order in which the table needs them.
"""

from meshwright.costmodel.simulate.compiled_schedule import Table
from meshwright.costmodel.simulate.timeline import Times

_MOMENTS = 1e9
"""Per longest action: times of one moment are equal, whatever sums of parts they come from."""


def moments_per_s(times: Times) -> float:
    longest = max(program.own_s for programs in times.programs for program in programs)
    return _MOMENTS / longest if longest else 0.0


class Ports:
    """The ports of all pipeline ranks."""

    def __init__(self, table: Table, times: Times) -> None:
        self._table, self._times = table, times
        self._sending, self._getting = [0.0] * len(table.rows), [0.0] * len(table.rows)
        self._met: set[int] = set()
        self._per_s = moments_per_s(times)

    def met(self, position: int) -> bool:
        """Called when the message for an action is made and when it is asked for: whether it has
        been both."""
        if position in self._met:
            return True
        self._met.add(position)
        return False

    def turn_s(self, now: float) -> float:
        """When all messages that are ready at the same moment as one now are known."""
        return (int(now * self._per_s + 0.5) + 0.5) / self._per_s if self._per_s else now

    def send(self, position: int, ready: float) -> tuple[float, float]:
        """When the message goes and when it is there."""
        item = self._table.items[position]
        source, target = self._table.pairs[item.pair]
        begin = max(ready, self._sending[source], self._getting[target])
        end = self._sending[source] = self._getting[target] = begin + self._times.lanes_s[item.lane]
        return begin, end
