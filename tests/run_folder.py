"""The folder of a run of tests: all that they write, and what one worker has traced for others.

It is in memory where there is room. Tests write many small files, and profiles and checkpoints wait
until each is safe: on a disk, two cores stood still for minutes.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

FOLDER = "MESHWRIGHT_TESTS_FOLDER"
"""The variable that names it; read before anything of ours is loaded."""
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2**31


def make_folder() -> None:
    """Make it, unless another process of this run has, and remove it when this process ends."""
    if FOLDER in os.environ:
        return
    made = tempfile.mkdtemp(prefix="tests-of-meshwright-", dir=_root())
    os.environ[FOLDER] = os.environ["TMPDIR"] = made
    tempfile.tempdir = None  # it is asked for again
    owner = os.getpid()  # forks end by other ways, but some run what is registered
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))


def _root() -> Path | None:
    """Memory, if files there may be libraries too: some tests make one. Else None, as usual."""
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return None
    found = os.statvfs(_MEMORY)
    room = found.f_bavail * found.f_frsize >= _ROOM_BYTES
    return _MEMORY if room and not found.f_flag & os.ST_NOEXEC else None
