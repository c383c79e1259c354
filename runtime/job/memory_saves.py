"""The newest state in the memory of nodes, for a job that is started again.

`meshwright run --elastic` outlives its ranks, and so does a folder in memory (tmpfs) that it keeps
on each node. Ranks save there far more often than to disk, as such a save takes little; whoever is
started again goes on from there if it is newer than the disk's, whole and sound. With several nodes
each also has what the one before it has: no node's death takes the newest state along.
"""

import sys
import time
from itertools import count
from typing import Any

from meshwright.ir.comm.by_store import Aside
from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.background import BackgroundWriter
from meshwright.runtime.checkpoint.checkpoint import Snapshot
from meshwright.runtime.checkpoint.memory_writes import write_parts
from meshwright.runtime.checkpoint.node_memory import NodeMemory, free_bytes
from meshwright.runtime.checkpoint.remembered import Remembered, newest
from meshwright.runtime.job.job import Job

SHARE = 0.01
"""Of the time, that such saves may hold up training."""
LEAST_S = 1.0
"""From one save to the next."""
NO_ROOM_S = 60.0
"""After one for which a node had no room."""
_BYTES = 24
"""A parameter with its optimizer's state, in float64."""
_ROOM = 3
"""What must be free, in states of a node: a copy, what is written of it, and the neighbour's."""


class MemorySaves:
    """Saves of a job in memory; every rank calls the same methods in the same order."""

    def __init__(self, job: Job, memory: NodeMemory) -> None:
        self._job, self._memory = job, memory
        self._writer = BackgroundWriter(job.plan.world_size, memory.folder, self._write)
        nodes = 1 + len(memory.others)
        numbers = sum(tensor.numel for tensor in job.graph.parameters)
        self._room = _ROOM * _BYTES * numbers // nodes
        self._since, self._held_s = time.monotonic(), 0.0
        self._off = self._full = False
        self._numbers = count()
        """Of saves: a job that went back saves a step again, and its two states are not one."""

    def newer_than(self, step: int) -> Remembered | None:
        """The newest state here if it is of a later step; every rank calls it."""
        return newest(self._memory, step)

    def is_due(self) -> bool:
        """Whether it is time; rank 0 asks."""
        if self._off or self._writer.is_writing:
            return False
        waits_s = max(LEAST_S, self._held_s / SHARE, NO_ROOM_S * self._full)
        return time.monotonic() - self._since > waits_s and (
            free_bytes(self._memory.folder) > self._room
        )

    def _write(self, found: Snapshot, aside: Aside | None) -> None:
        job = self._job
        own, ranks = job.parts.rank, job.plan.world_size
        self._full = not write_parts(found, self._memory, next(self._numbers), own, ranks, aside)

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
