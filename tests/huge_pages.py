"""Memory of this process in pages of 2 MiB: a fork then copies a table that is 500 times as short.

Ranks are forked from a process with a gigabyte and more; half of what a fork took was that table.
"""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PAGE = 2**21
_COLLAPSE = 25
"""`MADV_COLLAPSE` of Linux 6.1: at once, whatever the setting for later memory."""


def use_huge_pages() -> None:
    """Puts what this process holds by now into such pages, where Linux can."""
    with suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        for first, last in _private(Path("/proc/self/maps").read_text()):
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)


def _private(maps: str) -> Iterator[tuple[int, int]]:
    """Whole such pages among what no file is behind."""
    for line in maps.splitlines():
        place, rights, _, _, node, *name = line.split()
        if rights != "rw-p" or node != "0" or name not in ([], ["[heap]"]):
            continue
        first, last = (int(part, 16) for part in place.split("-"))
        first, last = -(-first // _PAGE) * _PAGE, last // _PAGE * _PAGE
        if first < last:
            yield first, last
