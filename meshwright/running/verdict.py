"""What becomes of a job that ended: whether it is started again, and without what."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from meshwright.running.ranks import JobEnd
from meshwright.runtime.world.exit_codes import STOP
from meshwright.runtime.world.failure import FirstFailure

_OWN_FAULT, _OTHERS_FAULT = 2, 3
"""So many times at one step, with no start between that came further, ends the job: an error that
it raised, or whatever kills it there."""
_IN_VAIN = 5
"""Starts in a row that get no further than one before, whatever ends them."""
_REFUSALS = frozenset({2, 3, 4, 5})
"""Exit codes of what breaks a rule: it would break it again."""
_ERRORS = {3: ("Infeasible",), 4: ("PlanError", "NonFinite", "TraceError"),
           5: ("MismatchError", "CheckFailed")}  # fmt: skip
"""The errors that end with them."""


@dataclass(frozen=True)
class FailureVerdict:
    """What to do after a failure."""

    again: bool
    why: str
    exit_code: int = 0
    """Where it is not started again."""


def judge(end: JobEnd, before: Sequence[FirstFailure]) -> FailureVerdict:
    """Of a job that ended by a failure; `before` are those of the starts before, oldest first, back
    to one that left as it was asked to."""
    cause = end.cause
    assert cause is not None
    if _is_no_fault(cause):
        return FailureVerdict(again=True, why="")
    before = [one for one in before if not _is_no_fault(one)]
    code = end.codes.get(cause.rank, 1)
    if code not in _REFUSALS:
        code = next((n for n, names in _ERRORS.items() if cause.error.startswith(names)), 0)
    if code:
        return FailureVerdict(again=False, why="it would be refused again", exit_code=code)
    since_further = takewhile(lambda one: one.step <= cause.step, reversed(before))
    times = 1 + sum(_alike(one, cause) for one in since_further)
    own = cause.kind == "raised" or (cause.kind == "died" and cause.error in _CRASHES)
    if times >= (_OWN_FAULT if own else _OTHERS_FAULT):
        why = f"the same at the same step, {times} times"
        return FailureVerdict(again=False, why=why, exit_code=STOP)
    steps = [one.step for one in (*before, cause)]
    if (in_vain := len(steps) - 1 - steps.index(max(steps))) >= _IN_VAIN:
        why = f"{in_vain} starts in a row came no further"
        return FailureVerdict(again=False, why=why, exit_code=STOP)
    return FailureVerdict(again=True, why="")


_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
"""Of signals, those that a program brings upon itself."""


def _is_no_fault(cause: FirstFailure) -> bool:
    """A machine that goes before any step was taken says nothing of the job."""
    return cause.kind == "gone" and cause.step < 0


def _alike(one: FirstFailure, other: FirstFailure) -> bool:
    """Whether both are one error at one step, on whatever rank."""
    return (one.kind, one.step, one.error) == (other.kind, other.step, other.error)
