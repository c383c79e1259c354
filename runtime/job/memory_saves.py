"""The newest state in the memory of the machine, for a job that its supervisor starts again.

`meshwright run --elastic` outlives its ranks, and so does a folder in memory (tmpfs) that it gives
them. They save there far more often than to disk, as such a save takes little; whoever is started
again goes on from there if it is newer than the disk's, and sound. It is gone with the machine.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from meshwright.ir.comm.by_store import from_first
from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.background import BackgroundWriter
from meshwright.runtime.job.job import Job

FOLDER = "MESHWRIGHT_MEMORY"
"""Environment variable: the folder that the supervisor keeps."""
SHARE = 0.01
"""Of the time, that such saves may hold up training."""
LEAST_S = 1.0
"""From one save to the next."""
_BYTES = 24
"""A parameter with its optimizer's state, in float64."""
_ROOM = 3
"""What must be free, in states: one is there while the next is written from a copy."""


def given_folder() -> Path | None:
    """The supervisor's folder, if there is one."""
    text = os.environ.get(FOLDER, "")
    return Path(text) if text else None


class MemorySaves:
    """Saves of a job in memory; every rank calls the same methods in the same order."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._writer = BackgroundWriter(job.parts.rank, job.plan.world_size, folder, keep=1)
        self._room = _ROOM * _BYTES * sum(tensor.numel for tensor in job.graph.parameters)
        self._since, self._held_s = time.monotonic(), 0.0
        self._off = False

    def newer_than(self, step: int) -> Path | None:
        """The newest checkpoint here if it is of a later step; every rank calls it."""

        def newest() -> Path | None:
            try:
                found = self._folder / folders.named(self._folder)
            except PlanError:
                return None
            return found if folders.step_of(found) > step else None

        found: Path | None = from_first(newest())
        return found

    def is_due(self) -> bool:
        """Whether it is time; rank 0 asks."""
        if self._off or self._writer.is_writing:
            return False
        waits_s = max(LEAST_S, self._held_s / SHARE)
        return time.monotonic() - self._since > waits_s and self._has_room()

    def _has_room(self) -> bool:
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:  # somebody has removed it: the job goes on, with the disk alone
            return False
        return min(psutil.virtual_memory().available, free) > self._room

    def save(self, scheduler: Any) -> None:
        """Copies the state and begins to write it. What fails ends these saves, not the job."""
        began = time.monotonic()
        if not self._settled():
            return
        self._writer.start(self._job.snapshot(scheduler))
        self._since = time.monotonic()
        self._held_s = self._since - began

    def finish(self) -> None:
        """Waits for what is being written."""
        self._settled()

    def _settled(self) -> bool:
        try:
            self._writer.wait()
        except PlanError as error:  # on all ranks
            if not self._off and self._job.parts.rank == 0:
                print(f"meshwright: no more saves in memory: {error}", file=sys.stderr, flush=True)
            self._off = True
        return not self._off
