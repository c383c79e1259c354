"""Functions of other modules that are replaced for one thread and stay as they are for the rest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

_changing = Lock()
_replaced: dict[tuple[int, str], tuple[Any, dict[int, list[Any]]]] = {}
"""By module and name: the original, and by thread that one and what it has put in its place."""


@contextmanager
def replaced_here(where: Any, name: str, by: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Put `by(the function)` in the place of the function `where.name` for calls of this thread.

    Several threads may do so at once and end in any order; the last one puts the original back.
    """
    key, thread = (id(where), name), get_ident()
    with _changing:
        if key not in _replaced:
            original = getattr(where, name)
            _replaced[key] = original, {}
            setattr(where, name, _chooser(original, _replaced[key][1]))
        original, of_threads = _replaced[key]
        own = of_threads.setdefault(thread, [original])
        own.append(by(own[-1]))
    try:
        yield
    finally:
        with _changing:
            own.pop()
            if own == [original]:
                del of_threads[thread]
            if not of_threads:
                setattr(where, name, original)
                del _replaced[key]


def _chooser(original: Callable[..., Any], of_threads: dict[int, list[Any]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        own = of_threads.get(get_ident())
        return (own[-1] if own else original)(*args, **kwargs)

    return call
