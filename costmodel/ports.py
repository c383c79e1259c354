"""The ports that messages go through: each carries one at a time, in the order of their requests.

A rank has a port for what it sends and one for what it gets. Of a message both must be free.
"""

from meshwright.costmodel.table import Table
from meshwright.costmodel.timeline import Times


class Ports:
    """The ports of all pipeline ranks."""

    def __init__(self, table: Table, times: Times) -> None:
        self._table, self._times = table, times
        self._sending, self._getting = [0.0] * len(table.rows), [0.0] * len(table.rows)
        self._met: set[int] = set()
        self.receiver = {
            item.source: position for position, item in enumerate(table.items) if item.source >= 0
        }
        """Position of the action that makes a message -> position of the one that needs it."""

    def request(self, position: int, now: float) -> tuple[float, float] | None:
        """Once when the message is made and once when it is asked for; then when it goes."""
        if position not in self._met:
            self._met.add(position)
            return None
        item = self._table.items[position]
        source, target = self._table.pairs[item.pair]
        seconds = self._times.send_s[item.border]
        if not seconds:
            return now, now
        begin = max(now, self._sending[source], self._getting[target])
        end = self._sending[source] = self._getting[target] = begin + seconds
        return begin, end
