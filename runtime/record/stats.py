"""What steps took: the last ones in detail, of all others the duration and the loss."""

from collections import Counter
from dataclasses import dataclass, field

from meshwright.ir.launch import TAKEN, Call
from meshwright.ir.profile.measured import StepKind
from meshwright.runtime.record.record import StepRecord


@dataclass(frozen=True, eq=False, slots=True)
class Taken:
    """One step."""

    kind: StepKind
    step_s: float
    loss: float | None


@dataclass(eq=False)
class Stats:
    """Steps in order, newest last."""

    keep: int = 10_000
    detailed: int = 32
    taken: list[Taken] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    """The last timed steps, action by action."""
    called: Counter[Call] = field(default_factory=lambda: Counter(TAKEN))
    """Calls of kernels in the process before there was anything to take in."""

    def add(self, record: StepRecord) -> None:
        """Takes in a closed record."""
        self.taken.append(Taken(record.kind, record.step_s, record.loss))
        del self.taken[: -self.keep]
        if record.kind == "timed":
            self.records.append(record)
            del self.records[: -self.detailed]

    @property
    def step_s(self) -> list[float]:
        """Seconds of the timed steps."""
        return [step.step_s for step in self.taken if step.kind == "timed"]
