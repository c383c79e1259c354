"""Reads and writes of a checkpoint's files that do not trust what lies there."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshwright.ir.errors import PlanError


class DamagedError(PlanError):
    """A file of the checkpoint is not as it was written; an older checkpoint may be sound."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read; DamagedError unless it is a plain one, no link or device."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing") from error
    except OSError as error:
        link = " (it is a link)" if path.is_symlink() else ""
        raise DamagedError(f"{path} cannot be read: {error.strerror}{link}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DamagedError(f"{path} is not a plain file")
        try:
            yield file
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}") from error


def write(path: Path, text: str) -> None:
    """Writes a file in one move: it is whole, or as it was."""
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Has the disk know the names in a folder, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
