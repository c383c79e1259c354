"""Files that hold pieces of a checkpoint, wherever they lie."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright.runtime.checkpoint.files import opened


class PieceFiles(Protocol):
    """Those of one checkpoint, by name."""

    def where(self, name: str) -> str:
        """How an error calls a file."""

    def read_into(self, name: str, start: int, view: memoryview) -> int:
        """Fills `view` from byte `start` of a file on; how many bytes there were. DamagedError if
        it cannot be read."""


@dataclass(frozen=True)
class InFolder:
    """On a disk, or in a folder in memory."""

    folder: Path

    def where(self, name: str) -> str:
        return str(self.folder / name)

    def read_into(self, name: str, start: int, view: memoryview) -> int:
        with opened(self.folder / name) as file:
            file.seek(start, os.SEEK_SET)
            count: int = file.readinto(view)  # type: ignore[attr-defined]
        return count
