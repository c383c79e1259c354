import re
from pathlib import Path

import pytest

from meshwright.testing.spawn import alone
from tests.huge_pages import use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _huge_bytes() -> int:
    (found,) = re.findall(r"AnonHugePages: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return 1024 * int(found)


def _more() -> tuple[int, int]:
    """What a process that has filled 32 MiB has more in them afterwards, and what it had filled."""
    filled = bytearray(b"x") * 2**25
    before = _huge_bytes()
    use_huge_pages()
    return _huge_bytes() - before, sum(filled[:: 2**20])


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="Linux has none here"
)
def test_what_a_process_holds_is_in_them_and_stays_what_it_was() -> None:
    more, total = alone(_more)
    assert total == 32 * ord("x")
    assert more >= 2**24
