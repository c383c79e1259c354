"""Checkpoints written beside training: a step waits only for the copy on the host.

Each rank writes its file on a thread of its own. Rank 0's begins the folder, hears what the others
have written, and makes the checkpoint the newest one.
"""

import pickle
import threading
from itertools import count
from pathlib import Path
from typing import Any

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import job_store
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.checkpoint import (
    RankPart,
    Snapshot,
    check_keep,
    finish,
    write_part,
)

_KEY = "meshwright/saved"
_made = count()
"""Writers made in this process: as many on every rank, whatever is left in the store."""


class BackgroundWriter:
    """Writes one checkpoint at a time; every rank calls the same methods in the same order."""

    def __init__(self, rank: int, world_size: int, folder: Path, keep: int) -> None:
        check_keep(keep)
        self._rank, self._world, self._folder, self._keep = rank, world_size, folder, keep
        self._store: Any = job_store() if world_size > 1 else None
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._key, self._number = f"{_KEY}/{next(_made)}", 0

    def start(self, found: Snapshot) -> None:
        """Begins to write; waits for the checkpoint before, and raises what failed in it."""
        self.wait()
        key = f"{self._key}/{self._number}"
        self._number += 1
        self._thread = threading.Thread(
            target=self._run, args=(found, key), name="meshwright saves", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raises what failed in this rank's part of a checkpoint."""
        if self._failed is not None:
            raise PlanError(
                f"{self._folder}: a checkpoint could not be written: {self._failed}"
            ) from self._failed

    def wait(self) -> None:
        """Returns when the checkpoint is whole, on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, found: Snapshot, key: str) -> None:
        try:
            self._write(found, key)
        except Exception as error:  # whatever it is, the thread that trains raises it
            self._failed = error

    def _write(self, found: Snapshot, key: str) -> None:
        if self._store is None:
            folders.begin(self._folder, found.step)
            finish(found, self._folder, [write_part(found, self._folder, self._rank)], self._keep)
        elif self._rank == 0:
            self._first(found, key)
        else:
            self._hear(f"{key}/begun")
            try:
                own: RankPart = write_part(found, self._folder, self._rank)
            except (OSError, PlanError) as error:
                self._say(f"{key}/{self._rank}", f"rank {self._rank}: {error}")
                raise
            self._say(f"{key}/{self._rank}", own)
            self._hear(f"{key}/done")

    def _first(self, found: Snapshot, key: str) -> None:
        """As rank 0. Whatever fails, the others are told, or would wait for good."""
        at = f"{key}/begun"
        try:
            folders.begin(self._folder, found.step)
            self._say(at, None)
            at = f"{key}/done"
            own = write_part(found, self._folder, 0)
            others = [f"{key}/{rank}" for rank in range(1, self._world)]
            everyone = [own, *map(self._hear, others)]
            for other in others:  # they are long, and would stay in the store
                self._store.delete_key(other)
            finish(found, self._folder, everyone, self._keep)
        except (OSError, PlanError) as error:
            self._say(at, f"rank 0: {error}")
            raise
        self._say(at, None)

    def _say(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))

    def _hear(self, key: str) -> Any:
        """What a rank said; PlanError if it is a failure."""
        value = pickle.loads(self._store.get(key))
        if isinstance(value, str):
            raise PlanError(value)
        return value
