"""How long a rank may stand still until that counts as a hang: learnt from what it has seen."""

from collections import defaultdict

HANG_S = 1800.0
"""A rank that stands still for so long hangs, unless it has learnt or was told less."""
LEAST_S = 300.0
"""Never less: a loader that opens its next file, or a checkpoint, is no hang."""
TIMES = 5.0
"""As often as the longest halt so far."""
STEPS = 10
"""Steps that are watched first: until then the most holds, since compilers work in the first."""


class Patience:
    """Of one rank, by phase of a step."""

    def __init__(self, most_s: float) -> None:
        """`most_s`: never more. What users set below `LEAST_S` holds as it is."""
        self.most_s = most_s
        self._longest_s: dict[str, float] = defaultdict(float)
        self._steps: set[int] = set()

    def saw(self, phase: str, step: int, halt_s: float) -> None:
        """The rank is in a phase of a step, at one place for so long so far."""
        if len(self._steps) <= STEPS:
            self._steps.add(step)
        self._longest_s[phase] = max(self._longest_s[phase], halt_s)

    def limit_s(self, phase: str) -> float:
        """From when on it hangs there."""
        if len(self._steps) <= STEPS:
            return self.most_s
        return min(self.most_s, max(LEAST_S, TIMES * self._longest_s[phase]))
