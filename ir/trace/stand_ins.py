"""Functions of others that are other ones while a trace lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock


@contextmanager
def standing_in(holder: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """Inside, `other` is called in place of a function that a module holds. A file that is imported
    meanwhile may take the name along for good: afterwards it calls what was there before."""
    original: Callable[..., Any] = getattr(holder, name)
    lasts = True

    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (other if lasts else original)(*args, **kwargs)

    with mock.patch.object(holder, name, called):
        try:
            yield
        finally:
            lasts = False
