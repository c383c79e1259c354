"""Checkpoints written beside training: a step waits only for the copy on the host.

Each rank writes on a thread of its own what it would write itself, and tells the others aside.
"""

import threading
import time
from collections.abc import Callable

from meshwright.ir.comm.by_store import Aside
from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.checkpoint import Snapshot

Write = Callable[[Snapshot, Aside | None], object]
"""Writes a rank's part; None where it is alone."""


class BackgroundWriter:
    """Writes one checkpoint at a time; every rank calls the same methods in the same order."""

    def __init__(self, world_size: int, where: object, write: Write) -> None:
        """`where` is what an error names."""
        self._where, self._write = where, write
        self._aside = Aside() if world_size > 1 else None
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self.took_s: float | None = None
        """Seconds until the newest whole checkpoint was written, from the end of the copy."""

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part, and on rank 0 the whole checkpoint, is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, found: Snapshot) -> None:
        """Begins to write; waits for the checkpoint before, and raises what failed in it."""
        self.wait()
        self._thread = threading.Thread(
            target=self._run, args=(found,), name="meshwright saves", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises what failed in a checkpoint, on this rank or on another one."""
        if isinstance(self._failed, PlanError):
            raise PlanError(str(self._failed)) from self._failed
        if self._failed is not None:
            raise PlanError(
                f"{self._where}: a checkpoint could not be written: {self._failed}"
            ) from self._failed

    def wait(self) -> None:
        """Returns when the checkpoint is whole, on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, found: Snapshot) -> None:
        began = time.monotonic()
        try:
            self._write(found, self._aside)
            self.took_s = time.monotonic() - began
        except Exception as error:  # whatever it is, the thread that trains raises it
            self._failed = error
