"""When a search must end: every phase asks, also those that make no plans yet, and the trace."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic, thread_time  # bound here: a trace notes who asks `time`, and changes it

_END: ContextVar[float] = ContextVar("search_end", default=float("inf"))
"""On the clock `time.monotonic`."""
_BUSY_END: ContextVar[float] = ContextVar("trace_end", default=float("inf"))
"""On the processor clock of this thread."""


_STOP: ContextVar[threading.Event | None] = ContextVar("search_stop", default=None)


class SearchStopped(Exception):
    """Ends a search, without a plan: nobody waits for one any more."""


class TimeUp(Exception):
    """Ends whatever is being computed; who set the deadline catches it."""


@contextmanager
def until(end: float) -> Iterator[None]:
    """Inside, `check_time` raises TimeUp after `end`, or after an earlier deadline around it."""
    token = _END.set(min(end, _END.get()))
    try:
        yield
    finally:
        _END.reset(token)


@contextmanager
def busy_for(seconds: float) -> Iterator[None]:
    """Inside, `check_time` raises TimeUp once this thread has computed for so long, or for as long
    as one around it allows: what others do on the machine ends nothing that cannot be cut short."""
    token = _BUSY_END.set(min(thread_time() + seconds, _BUSY_END.get()))
    try:
        yield
    finally:
        _BUSY_END.reset(token)


@contextmanager
def part_of_busy(share: float) -> Iterator[None]:
    """Inside, that share of what is left is all there is; no end if nobody has set one."""
    with busy_for(share * (_BUSY_END.get() - thread_time())):
        yield


@contextmanager
def stopped_by(stop: threading.Event) -> Iterator[None]:
    """Inside, `check_time` raises SearchStopped once the event is set."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


def check_time() -> None:
    """TimeUp if the search has taken its time, SearchStopped if it is to end."""
    if (stop := _STOP.get()) is not None and stop.is_set():
        raise SearchStopped
    if monotonic() > _END.get() or thread_time() > _BUSY_END.get():
        raise TimeUp
