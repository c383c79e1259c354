"""Records of steps: closed as soon as their step is over, on a GPU when the next one has been sent
off, so that the device always has work while the host waits."""

from collections import deque
from collections.abc import Iterator

from meshwright.runtime.record.record import StepRecord
from meshwright.runtime.record.stats import Stats


class StepRecords:
    """The records of a job's steps, in order."""

    def __init__(self, *, late: bool) -> None:
        """`late`: the device works on what the host has sent off, and is not waited for."""
        self.late = late
        self._stats = Stats()
        self._ended: deque[StepRecord] = deque()
        """Those that nobody has looked back at."""

    @property
    def any_taken(self) -> bool:
        """Whether a step has been sent off."""
        return bool(self._ended or self._stats.taken)

    @property
    def stats(self) -> Stats:
        """Of all steps so far: waits for the last one."""
        for record in self._ended:
            self._close(record)
        return self._stats

    def add(self, record: StepRecord) -> None:
        """Takes in the record of a step that has been sent off."""
        self._ended.append(record)

    def over(self, *, all_of_them: bool) -> Iterator[StepRecord]:
        """Yields, once, the records of steps that are over: all but the newest where it is late,
        unless it is to be waited for, too."""
        keep = 0 if all_of_them or not self.late else 1
        while len(self._ended) > keep:
            record = self._ended.popleft()
            self._close(record)
            yield record

    def forget(self) -> None:
        """Nothing has been."""
        self._ended.clear()
        self._stats = Stats()

    def _close(self, record: StepRecord) -> None:
        if not record.is_closed:
            record.close()
            self._stats.add(record)
