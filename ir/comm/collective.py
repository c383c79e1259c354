"""A collective as those see it who note what a step did: which one it is, and when it is over."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
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
    """The whole value, as if replicated on the group; of a form's all-to-all, what this rank gives:
    others give as much as they have."""
    size: int
    form: str = ""
    """Key of the form of synchronisation that it belongs to; empty: of none."""


class Notes(Protocol):
    """Where collectives are noted; the runtime's recorder is one."""

    def mark(self) -> Any:
        """Returns the present moment."""

    def pending(self, what: What, work: Waitable, start: Any) -> Waitable:
        """Returns `work`, begun at the moment `start`; waiting for it is noted."""

    def collective(self, what: What) -> AbstractContextManager[None]:
        """Notes what runs inside as one collective that the rank waits for."""


@dataclass(frozen=True, eq=False, slots=True)
class NotesOfForm:
    """Notes under which all that goes is a form's."""

    notes: Notes
    form: str

    def mark(self) -> Any:
        return self.notes.mark()

    def pending(self, what: What, work: Waitable, start: Any) -> Waitable:
        return self.notes.pending(what._replace(form=self.form), work, start)

    def collective(self, what: What) -> AbstractContextManager[None]:
        return self.notes.collective(what._replace(form=self.form))
