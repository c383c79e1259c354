"""The mesh as what is recorded may see it: not where training stands, which is elsewhere at each
replay."""

from typing import Any

from meshwright.codegen.collectives.comm import Comm, Held
from meshwright.ir.errors import PlanError

_CHANGES = {
    "step": "the step's number, as random numbers do",
    "microbatch": "which micro-batch it is",
    "sample_offset": "which samples it has",
}


class FixedMesh(Comm):
    """A mesh that is another one's, but for what changes; and nothing in it is timed."""

    __slots__ = ("held",)
    held: Held | None
    """Its own: where numbers of the micro-batch are that is recorded."""

    def __init__(self, of: Comm) -> None:
        self.__dict__ = of.__dict__  # one state: this is a view of it
        self.held = None

    def __getattribute__(self, name: str) -> Any:
        if name in _CHANGES:
            raise PlanError(f"it reads {_CHANGES[name]}; a replay would read the same for ever")
        if name == "meter":
            return None
        return super().__getattribute__(name)
