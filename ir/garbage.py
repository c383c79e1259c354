"""Fewer garbage collections while much is made that stays: each goes through the whole graph."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 200_000
"""New objects between two collections of young ones; Python's usual number is below a thousand."""
FEWER_OBJECTS = 10_000
"""For a whole command, which loads torch and a model. The search of a small Hugging Face model took
4.0 s of processor time with Python's number, 3.1 s so, 2.9 s without any collection."""
_outside: list[tuple[int, int, int]] = []
"""What was set outside of each `rare_collections` that is under way."""


@contextmanager
def rare_collections(objects: int = OBJECTS, *, set_aside: bool = False) -> Iterator[None]:
    """Collects rarely inside; afterwards as before. With `set_aside` only what is made inside is
    gone through, and not traced graphs and loaded libraries."""
    usual = gc.get_threshold()
    _outside.append(usual)
    frozen = set_aside and not gc.get_freeze_count()
    if frozen:  # else a caller has, and what is his stays as it is
        gc.freeze()
    if usual[0]:  # zero is a caller's wish that nothing be collected
        gc.set_threshold(max(objects, usual[0]), *usual[1:])
    try:
        yield
    finally:
        _outside.pop()
        gc.set_threshold(*usual)
        if frozen:
            gc.unfreeze()


def usual_collections() -> None:
    """Collects as outside of every `rare_collections`: for jobs, as cycles may hold tensors."""
    if _outside:
        gc.set_threshold(*_outside[0])
