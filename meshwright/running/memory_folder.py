"""A folder in memory that outlives the ranks of a job, and goes with their supervisor."""

import difflib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import shown
from meshwright.runtime.checkpoint.files import DamagedError, opened

ROOT = Path("/dev/shm")
"""Where Linux keeps files in memory."""
NEIGHBOUR, OFF = "neighbour", "off"
MEMORY_SAVES = (NEIGHBOUR, "machine", OFF)
"""Where the newest state is: in the memory of its node and of the next one, of its node alone, or
nowhere."""
_PREFIX, _LOCK = "meshwright-", "lock"


def check_memory_saves(text: str) -> None:
    """PlanError unless it is one of them."""
    if text not in MEMORY_SAVES:
        near = difflib.get_close_matches(text, MEMORY_SAVES, 1, 0.0)[0]
        raise PlanError(
            f"--memory-saves {shown(text)} is none of {', '.join(MEMORY_SAVES)}; nearest is "
            f"{near!r}"
        )


@contextmanager
def memory_folder() -> Iterator[Path | None]:
    """A new folder for as long as the block lasts; None where the system has no files in memory.

    Its owner holds a lock on it. Folders whose owner was killed are removed by the next one.
    """
    if not (ROOT.is_dir() and os.access(ROOT, os.W_OK)):
        yield None
        return
    import fcntl

    for left in ROOT.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError, DamagedError), opened(left) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=ROOT))
    path = made.with_name(made.name.removeprefix("."))
    with (made / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made.rename(path)  # from here on others look at it, and find it locked
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
