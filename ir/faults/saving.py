"""How often to save: rarely enough that saving costs little, often enough that a failure does.

J. W. Young, A first order approximation to the optimum checkpoint interval (1974): the square root
of 2 x what a save holds up x the time between failures. J. T. Daly's estimate (2006) has two more
terms, which count where saving takes long.
"""

from dataclasses import dataclass
from math import sqrt

from meshwright.ir.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingCost:
    """What saves cost a job, and failures one that saves."""

    held_s: float
    """Seconds that one save holds up training: the copy on the host, if it is written beside."""
    write_s: float
    """Until it is whole, from the end of the copy; the next save waits for it."""
    between_s: float
    """Mean time between failures of the job."""
    back_s: float = 0.0
    """From a failure until the job trains again."""

    def __post_init__(self) -> None:
        for name in ("held_s", "write_s", "between_s", "back_s"):
            value = getattr(self, name)
            least_known = name == "between_s"
            if not (0 < value if least_known else 0 <= value) or value == float("inf"):
                raise PlanError(
                    f"{name} is {value}; it must be a finite number of seconds, "
                    f"{'above 0' if least_known else 'at least 0'}"
                )

    @property
    def interval_s(self) -> float:
        """Seconds of training from one save to the next by which least time is lost; no less than a
        save is written in, as a job writes one at a time."""
        held, between = self.held_s, self.between_s
        if held >= 2 * between:
            return max(between, self.write_s)
        part = held / (2 * between)
        daly = sqrt(2 * held * between) * (1 + sqrt(part) / 3 + part / 9) - held
        return max(daly, self.write_s)

    def lost(self, interval_s: float) -> float:
        """The share of time that is lost with such an interval, to the first order: what saves hold
        up, and of each failure half an interval, what was being written, and the way back."""
        if interval_s <= 0:
            raise PlanError(f"interval_s is {interval_s}; it must be above 0")
        saves = self.held_s / (interval_s + self.held_s)
        failures = (interval_s / 2 + self.write_s + self.back_s) / self.between_s
        return min(1.0, saves + failures)
