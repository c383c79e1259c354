"""Whoever starts ranks holds a lease: a file on the disk that all nodes see.

So of two parts of a cluster that cannot reach each other only one goes on, however few nodes it
takes, and a leader that was stopped finds out that it leads no more. Whoever holds it writes a
count into it at each beat; who finds the same count at so many looks takes it over. Two that take
it over at once: the file has one token in the end, and it holds from the second beat on.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from meshwright.ir.errors import MeshwrightError, PlanError
from meshwright.running.nodes.each_beat import EachBeat
from meshwright.running.nodes.members import QUIET_BEATS
from meshwright.runtime.checkpoint.fence import token_of
from meshwright.runtime.world.failure import BEAT_S
from meshwright.runtime.world.stillness import Stillness

NAME = "leader"
"""In the folder of checkpoints."""
_SURE = 2
"""Beats until one that was taken over holds."""
_LONGEST = 64


class LeaseLost(MeshwrightError):
    """Another node has taken the lease over."""


@dataclass(eq=False)
class Lease:
    """Of one supervisor, which may have it or not."""

    path: Path
    token: str = field(default_factory=lambda: uuid4().hex)
    _beats: int = -1
    """Since it was taken; -1: it is not this one's."""
    _lost: bool = False
    _beats_of_other: Stillness = field(default_factory=Stillness)
    """Of whoever has it, since the file is there."""
    _lock: Any = field(default_factory=threading.Lock)
    _looks: EachBeat = field(default_factory=lambda: EachBeat("lease", BEAT_S))

    def watch(self) -> None:
        """From here on beats, or looks whether whoever has it does, on a thread."""
        self._looks.begin(self.look)

    def close(self) -> None:
        """Gives it back, if it is this one's."""
        self._looks.end()
        self.release()

    def acquire(self) -> bool:
        """Takes it if it is free, or nobody beats; whether it is held. PlanError if the folder is
        not to be written."""
        with self._lock:
            try:
                if self._beats < 0 and not self.path.exists():
                    self._beats = _SURE if self._create() else -1
                elif self._beats < 0 and self._beats_of_other.looks >= QUIET_BEATS:
                    self._written().replace(self.path)
                    self._beats = 0
            except OSError as error:
                raise PlanError(
                    f"{self.path}: whoever leads the nodes writes this file, and it cannot be "
                    f"written: {error}"
                ) from error
            return self._beats >= _SURE

    def release(self) -> None:
        """Leaves it to others, if it is this one's."""
        with self._lock:
            if self._beats < 0:
                return
            with suppress(OSError):  # it has gone, or cannot be read: others will take it
                if token_of(self._read()) == self.token:
                    self.path.unlink()
            self._leave_it()

    def check(self) -> None:
        """LeaseLost, once, if another one has taken what this one had."""
        if self._lost:
            self._lost = False
            raise LeaseLost("another node leads the job by now")

    def look(self) -> None:
        """One beat of whoever has it, one look of the others."""
        with self._lock, suppress(OSError):  # of a disk that is away: others will take it
            if self._beats < 0 and self.path.exists():
                self._beats_of_other.look(self._read())
            elif self._beats < 0:  # one that comes has not been quiet
                self._beats_of_other = Stillness()
            elif not self.path.exists():  # somebody has tidied up
                self._create()
            elif self._beat():
                self._beats += 1
            else:
                self._leave_it()
                self._lost = True

    def _leave_it(self) -> None:
        self._beats, self._beats_of_other = -1, Stillness()

    def _beat(self) -> bool:
        """Whether it is still this one's. Into the file that was read: what took its place since
        stays as it is."""
        with self.path.open("r+b") as file:
            if token_of(file.read(_LONGEST)) != self.token:
                return False
            file.seek(0)
            file.write(self._content())
        return True

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(_LONGEST)

    def _content(self) -> bytes:
        return f"{self.token} {self._beats:012d}\n".encode("ascii")

    def _written(self) -> Path:
        """A file of its own beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        own = self.path.with_name(f"{NAME}.{self.token}")
        own.write_bytes(self._content())
        return own

    def _create(self) -> bool:
        """Whether it is there now and was not before: of several, one succeeds."""
        own = self._written()
        try:
            os.link(own, self.path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True
