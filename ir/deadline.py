"""When a search must end: every phase asks, also those that make no plans yet, and the trace."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from math import inf
from time import monotonic, thread_time  # bound here: a trace notes who asks `time`, and changes it
from typing import TypeVar

T = TypeVar("T")
_END: ContextVar[float] = ContextVar("search_end", default=inf)
"""On the clock `time.monotonic`."""
_STOP: ContextVar[threading.Event | None] = ContextVar("search_stop", default=None)


class _ThreadEnd:
    """An end on the processor clock of a thread, which goes no faster than `time.monotonic`: it is
    not asked, a call of the system that a trace would make 100,000 times, before it can be up."""

    def __init__(self, end: float) -> None:
        self.end, self._not_before = end, -inf

    def is_up(self, now: float) -> bool:
        if now < self._not_before:
            return False
        left = self.end - thread_time()
        self._not_before = now + left
        return left < 0


_BUSY: ContextVar[_ThreadEnd | None] = ContextVar("trace_end", default=None)


class SearchStopped(Exception):
    """Ends a search, without a plan: nobody waits for one any more."""


class TimeUp(Exception):
    """Ends whatever is being computed; who set the deadline catches it."""


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def until(end: float) -> AbstractContextManager[None]:
    """Inside, `check_time` raises TimeUp after `end`, or after an earlier deadline around it."""
    return _within(_END, min(end, _END.get()))


def busy_for(seconds: float) -> AbstractContextManager[None]:
    """Inside, `check_time` raises TimeUp once this thread has computed for so long, or for as long
    as one around it allows: what others do on the machine ends nothing that cannot be cut short."""
    return _within(_BUSY, _ThreadEnd(min(thread_time() + seconds, _busy_end())))


def part_of_busy(share: float) -> AbstractContextManager[None]:
    """Inside, that share of what is left is all there is; no end if nobody has set one."""
    return busy_for(share * (_busy_end() - thread_time()))


def _busy_end() -> float:
    return busy.end if (busy := _BUSY.get()) else inf


def stopped_by(stop: threading.Event) -> AbstractContextManager[None]:
    """Inside, `check_time` raises SearchStopped once the event is set."""
    return _within(_STOP, stop)


def check_time() -> None:
    """TimeUp if the search has taken its time, SearchStopped if it is to end."""
    if (stop := _STOP.get()) is not None and stop.is_set():
        raise SearchStopped
    now = monotonic()
    if now > _END.get() or ((busy := _BUSY.get()) and busy.is_up(now)):
        raise TimeUp
