"""When a search must end: every phase asks, also those that make no plans yet."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_END: ContextVar[float] = ContextVar("search_end", default=float("inf"))
"""On the clock `time.monotonic`."""


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


def check_time() -> None:
    """TimeUp if the search has taken its time."""
    if time.monotonic() > _END.get():
        raise TimeUp
