"""Keeps freed memory in the process, so that tensors are not faulted in anew in every step."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = 2**31 - 1
_APART_BYTES, _APART_MOST = 2**16, 2**16
"""From this size on tensors lie apart; so many at most (what Linux lets a process map)."""


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to reuse freed memory; False where there is no glibc.

    By default large tensors go back to the kernel when they are freed, and the pages of the next
    ones are faulted in and zeroed: 5-15 % of a step on CPUs, and most of its noise.
    """
    mallopt = _of_glibc("mallopt")
    return bool(mallopt and mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


@contextmanager
def kept_apart() -> Iterator[None]:
    """Inside, tensors lie apart from the heap and go back to the kernel when they are freed.

    For work whose memory will not come again, in a process that keeps freed memory: small things
    that outlive it would else lie between its tensors, and large tensors of later steps not fit
    into what is left.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _APART_BYTES)
    mallopt(_M_MMAP_MAX, _APART_MOST)
    try:
        yield
    finally:
        keep_freed_memory()


def give_back_freed_memory() -> bool:
    """Gives what is free now back to the kernel, once; False where there is no glibc.

    For the end of something large that will not come again: making a job takes whole parameters
    where training has parts of them.
    """
    trim = _of_glibc("malloc_trim")
    return bool(trim and trim(0))


def _of_glibc(name: str) -> Any:
    """A function; None on another system or with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
