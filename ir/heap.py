"""Keeps freed memory in the process, so that tensors are not faulted in anew in every step."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to reuse freed memory; False where there is no glibc.

    By default large tensors go back to the kernel when they are freed, and the pages of the next
    ones are faulted in and zeroed: 5-15 % of a step on CPUs, and most of its noise.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    kept = mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    return bool(kept)
