"""When a search must end: every phase asks, also those that make no plans yet."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_END: ContextVar[float] = ContextVar("search_end", default=float("inf"))
"""On the clock `time.monotonic`."""


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
    if time.monotonic() > _END.get():
        raise TimeUp
