"""Work of a backward that nobody waits for, such as gradients of weights: it is put off until there
is a message for it to be beside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Later:
    """What is to be done, in order."""

    def __init__(self) -> None:
        self._works: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Takes on one more piece of work."""
        self._works.append(work)

    def run(self) -> None:
        """Does all that has been put off."""
        works, self._works = self._works, []
        for work in works:
            work()


_OPEN: list[Later] = []
"""Who takes on work now; backwards run on a thread of their own where the device is a GPU."""


@contextmanager
def put_off(later: Later) -> Iterator[None]:
    """Inside, backwards may leave work to `later`."""
    _OPEN.append(later)
    try:
        yield
    finally:
        _OPEN.pop()


def taking() -> Later | None:
    """Who takes on work; None: it is to be done at once."""
    return _OPEN[-1] if _OPEN else None
