"""A collective as those see it who note what a step did: which one it is, and when it is over."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.profile.measured import Purpose


class What(NamedTuple):
    """Which collective."""

    purpose: Purpose
    stage: int
    axis: str
    primitive: str
    nbytes: int
    """The whole value, as if replicated on the group."""
    size: int


class Notes(Protocol):
    """Where collectives are noted; the runtime's recorder is one."""

    def mark(self) -> Any:
        """Returns the present moment."""

    def pending(self, what: What, work: Waitable, start: Any) -> Waitable:
        """Returns `work`, begun at the moment `start`; waiting for it is noted."""

    def collective(self, what: What) -> AbstractContextManager[None]:
        """Notes what runs inside as one collective that the rank waits for."""
