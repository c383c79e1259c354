"""Where a rank stands, as it tells the others, and which of all is the first cause of a halt.

Peers of a collective stand still together. Who is inside it waits, and the one who is not there
keeps them waiting: the stack of the thread that steps says which is which.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType

import torch

from meshwright.runtime.step.executor import RankProgress

_PACKAGE = str(Path(__file__).parents[2])
_TORCH = os.path.dirname(torch.__file__)
_WAITING = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in (
        *(os.path.join(_PACKAGE, name) for name in ("ir", "codegen", "runtime")),
        *(os.path.join(_TORCH, name) for name in ("distributed", "cuda")),
    )
)
"""Where code lies that waits for other ranks. What users write, operators that they call, and
generated code lie elsewhere."""
LEFT = "left"
"""The phase of a rank that has nothing more to do with the others."""


@dataclass(frozen=True, slots=True)
class RankStanding:
    """What a rank says of itself at a beat."""

    step: int
    action: str
    phase: str
    entered: int
    """Actions and phases entered so far: the same on ranks that do the same."""
    waits: bool
    """For other ranks, as far as its stack says."""
    place: str
    """Function and line that its thread is in."""
    busy_s: float = 0.0
    """What its newest step took, without what it waited for others."""

    @property
    def has_stepped(self) -> bool:
        """Whether a step is over; a job that goes on has a number of a step before that."""
        return self.busy_s > 0

    @property
    def outside(self) -> bool:
        """Whether it is between two steps: in the user's loop, or in a loader."""
        return self.phase == "idle"

    def __str__(self) -> str:
        if self.phase == LEFT:
            return self.action
        if self.outside:
            return (
                f"outside a step, {'after' if self.action == 'end' else 'before'} step {self.step}"
            )
        return f"step {self.step}, action {self.action}"


def standing(progress: RankProgress) -> RankStanding:
    """Where the rank of this process is now."""
    code, line = _innermost(progress.thread)
    waits = progress.phase == "receiving" or (
        progress.phase != "idle" and code is not None and _is_waiting(code)
    )
    place = "" if code is None else _place(code, line)
    return RankStanding(
        progress.step,
        progress.action,
        progress.phase,
        progress.entered,
        waits,
        place,
        progress.busy_s,
    )


def left(found: RankStanding, ended_by: str) -> RankStanding:
    """Of a rank that leaves; `ended_by` is a signal, or nothing."""
    how = f", ended by {ended_by}" * bool(ended_by)
    return replace(found, action=f"{found}{how}", phase=LEFT, waits=False)


def dumps(found: RankStanding, count: int) -> str:
    """A beat: it changes with the count."""
    return json.dumps([count, asdict(found)])


def loads(beat: bytes) -> RankStanding:
    """What a rank said at a beat."""
    return RankStanding(**json.loads(beat)[1])


def first_cause(standings: Mapping[int, RankStanding]) -> int:
    """The rank that the others wait for: one that has left, else the one furthest behind of those
    that do not wait; if all wait, the one furthest behind."""
    return min(standings, key=lambda rank: (_order(standings[rank]), rank))


def _order(found: RankStanding) -> tuple[int, int, int]:
    step = found.step + (found.outside and found.action == "end")
    return (0 if found.phase == LEFT else 1 + found.waits), step, found.entered


def _innermost(thread: int) -> tuple[CodeType | None, int]:
    """Returns the code that a thread is in, and its line. Who has the frame itself has all that its
    function and those that called it held, large tensors too, long after they have returned."""
    frame = sys._current_frames().get(thread)
    return (None, 0) if frame is None else (frame.f_code, frame.f_lineno)


def _is_waiting(code: CodeType) -> bool:
    """Whether the innermost Python code is of what waits for other ranks."""
    return os.path.realpath(code.co_filename).startswith(_WAITING)


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{line})"
