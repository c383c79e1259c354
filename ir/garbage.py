"""Fewer garbage collections while much is made that stays: each goes through the whole graph."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OBJECTS = 200_000
"""New objects between two collections of young ones; Python's usual number is below a thousand."""
FEWER_OBJECTS = 10_000
"""For a whole command, which loads torch and a model. The search of a small Hugging Face model took
4.0 s of processor time with Python's number, 3.1 s so, 2.9 s without any collection."""
_asked: list[int] = []
"""By each `rare_collections` that is under way, in whichever thread."""
_usual = gc.get_threshold()
"""What was set outside of them all."""
_kept = False
"""Whether `keep_aside` was called: how much is set aside is found out by going through it."""


def keep_aside() -> None:
    """Has no collection go through what is there by now, until `take_back`."""
    global _kept
    gc.collect()
    gc.freeze()
    _kept = True


def take_back() -> None:
    """Ends `keep_aside`."""
    global _kept
    gc.unfreeze()
    _kept = False


@contextmanager
def rare_collections(objects: int = OBJECTS, *, set_aside: bool = False) -> Iterator[None]:
    """Collects rarely inside; afterwards as before, once no other thread is inside. With
    `set_aside` only what is made inside is gone through, and not traced graphs and loaded
    libraries."""
    global _usual
    if not _asked:
        _usual = gc.get_threshold()
    _asked.append(objects)
    _collect_for(_asked)
    frozen = set_aside and not _kept and not gc.get_freeze_count()
    if frozen:  # else a caller has, and what is his stays as it is
        gc.freeze()
    try:
        yield
    finally:
        rest = [*_asked]
        rest.remove(objects)
        _collect_for(rest)
        _asked.remove(objects)  # last: whoever begins meanwhile takes nothing rare for usual
        if frozen:
            gc.unfreeze()


def _collect_for(asked: Sequence[int]) -> None:
    first, *others = _usual
    if first:  # zero is a caller's wish that nothing be collected
        first = max([first, *asked])
    gc.set_threshold(first, *others)


def usual_collections() -> None:
    """Collects as outside of every `rare_collections`: for jobs, as cycles may hold tensors."""
    if _asked:
        gc.set_threshold(*_usual)
