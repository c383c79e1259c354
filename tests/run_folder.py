"""The folder of a run of tests: all that they write, and what one worker has traced for others.

It is in memory where there is room. Tests write many small files, and profiles and checkpoints wait
until each is safe: on a disk, two cores stood still for minutes.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

FOLDER = "MESHWRIGHT_TESTS_FOLDER"
"""The variable that names it; read before anything of ours is loaded."""
_PREFIX, _LOCK = "tests-of-meshwright-", "lock"
_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2**31


def make_folder() -> None:
    """Make it, unless another process of this run has, and remove it when this process ends; and
    those whose makers were killed."""
    if FOLDER in os.environ:
        return
    root = _root()
    for left in root.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), left.open() as held:  # its maker has it while it lives
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    made = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
    lock = Path(made) / f".{_LOCK}"
    fcntl.flock(os.open(lock, os.O_CREAT | os.O_WRONLY, 0o600), fcntl.LOCK_EX)
    lock.rename(lock.with_name(_LOCK))  # from here on other runs look at it
    os.environ[FOLDER] = os.environ["TMPDIR"] = made
    tempfile.tempdir = None  # it is asked for again
    owner = os.getpid()  # forks end by other ways, but some run what is registered
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))


def _root() -> Path:
    """Memory, if files there may be libraries too: some tests make one. Else where it is usual."""
    usual = Path(tempfile.gettempdir())
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return usual
    found = os.statvfs(_MEMORY)
    room = found.f_bavail * found.f_frsize >= _ROOM_BYTES
    return _MEMORY if room and not found.f_flag & os.ST_NOEXEC else usual
