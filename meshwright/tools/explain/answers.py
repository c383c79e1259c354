"""What became of a plan when something was a little different."""

from dataclasses import dataclass

from meshwright.ir.plan.show import seconds
from meshwright.ir.text.units import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One question."""

    question: str
    samples: int
    """Of the step that is asked about."""
    same_s: float | None
    """Seconds of a step of this plan then; None if it cannot be run so."""
    best_s: float | None
    """Of the best plan that was found then; None if none fits."""
    best: str
    """Its name."""
    peak_bytes: int
    change: float
    """Samples per second of the best, relative to this plan as it is: 0.1 is 10 % more."""

    @property
    def text(self) -> str:
        """A sentence."""
        if self.best_s is None:
            return f"{self.question}: no plan fits"
        said = [] if self.same_s is None else [f"this plan takes {seconds(self.same_s)}"]
        if self.best:
            said.append(
                f"the best is {self.best}, {seconds(self.best_s)} and {size(self.peak_bytes)}"
            )
        else:
            said.append("it stays the best that is found")
        return f"{self.question}: {', '.join(said)} ({self.change:+.1%} samples/s)"
