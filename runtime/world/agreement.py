"""Ranks agree after which step they do something that one of them asks for.

Between two steps a rank may be asked for what all have to do together: to save, to leave. It writes
into the job's store what is to be done and after which step, one that nobody has finished, and all
look there after each step. A step ends with a sum over all ranks, so who has finished that step
has waited for the one who asked, and finds what it wrote. Replicas that train alone wait for the
sum of a step some steps later, so they ask for as many steps more.
"""

import json
from itertools import count
from typing import Any

from meshwright.ir.comm.opening import STORE_OPERATION_S
from meshwright.ir.torch_private import job_store

_KEY = "meshwright/agreed"
_SHARE_S = 0.1
"""Of a step, that the store may be busy with the looks of all ranks."""
_made = count()
"""Agreements of this process: as many on every rank, whatever is left in the store."""


class Agreement:
    """One rank's view; every rank makes one at the same time, and asks `due` after each step."""

    def __init__(self, world_size: int, *, late: bool, lag: int = 0) -> None:
        """`late`: a rank may have sent off a step more than others have finished, as on GPUs;
        `lag`: steps after which it waits for the others."""
        self._ahead = (2 if late else 1) + lag
        self._stride = stride(world_size)
        self._store: Any = job_store() if world_size > 1 else None
        self._key, self._number = f"{_KEY}/{next(_made)}", 0
        self._own: tuple[int, str] | None = None

    def ask(self, step: int, what: str) -> bool:
        """Asks, after `step` steps, for something after one of the next; False if another rank has
        asked for something else that is not done yet: then this one has to ask again."""
        wanted = self._stride * -(-(step + self._ahead) // self._stride), what
        if self._store is None:
            free = self._own is None
            self._own = self._own or wanted
            return free
        key = f"{self._key}/{self._number}"
        if self._store.add(f"{key}/asked", 1) != 1:
            return False
        self._store.set(key, json.dumps(wanted))
        return True

    def due(self, step: int) -> str:
        """What is to be done now that so many steps are taken, or nothing."""
        if step % self._stride:
            return ""
        key = f"{self._key}/{self._number}"
        if self._store is not None and self._own is None and self._store.check([key]):
            after, what = json.loads(self._store.get(key))
            self._own = after, what
        if self._own is None or step < self._own[0]:
            return ""
        what, self._own = self._own[1], None
        self._number += 1
        return what


def stride(world_size: int) -> int:
    """Ranks look after each so many steps: where they are many, not all after each one."""
    return max(1, round(world_size * STORE_OPERATION_S / _SHARE_S))
