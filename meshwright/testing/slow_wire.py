"""A wire of any speed between processes of one machine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshwright.ir.comm.collective import What
from meshwright.ir.comm.p2p_collectives import Waitable


@dataclass
class SlowWire:
    """Makes what a job waits for later last as long as `seconds` says: it goes at once, and whoever
    waits for it waits until that time is over, one message after the other as on a wire."""

    seconds: Callable[[What], float]
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    free: float = 0.0
    """When it is done with all that has begun."""
    waited: list[float] = field(default_factory=list)
    """Seconds for which it kept its rank waiting, message by message."""

    def begins(self, what: What) -> float:
        """Takes a message; returns when it will have arrived."""
        self.free = max(self.free, self.now()) + self.seconds(what)
        return self.free


@dataclass
class _Slow:
    """A message on its way."""

    work: Waitable
    wire: SlowWire
    ends: float

    def wait(self) -> Any:
        wire, begun = self.wire, self.wire.now()
        found = self.work.wait()
        wire.sleep(max(0.0, self.ends - wire.now()))
        wire.waited.append(wire.now() - begun)
        return found


@contextmanager
def slowed(job: Any, wire: SlowWire) -> Iterator[SlowWire]:
    """Puts a wire in the way of what a job sends and waits for later."""
    pending = job.recorder.pending

    def late(what: What, work: Waitable, start: Any) -> Any:
        return pending(what, _Slow(work, wire, wire.begins(what)), start)

    job.recorder.pending = late
    try:
        yield wire
    finally:
        job.recorder.pending = pending
