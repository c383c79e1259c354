"""Slow ranks are named, and given less to do: by a plan that knows of them, if it pays."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.running.replan import NewPlan, Replanner
from meshwright.running.slow_ranks import SlowRanks, Standings

GAIN = 1.1
"""How many times as fast steps are to become, or the job is not started again for it."""


@dataclass(eq=False)
class Relief:
    """Of one start of a job."""

    replanner: Replanner
    found: NewPlan
    """What the ranks run."""
    left_out: tuple[int, ...]
    devices: Sequence[int]
    """Of each rank."""
    say: Callable[[int, int, float], None]
    """Called with a rank, its device and how many times as long as others it takes, when that is
    new; 1 if it is as fast again."""
    _gain: float = 0.0
    _looks: SlowRanks = field(init=False)
    _search: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._looks = SlowRanks(self.found.plan)

    def is_found(self, standings: Standings) -> bool:
        """Whether there is a better plan; it is searched beside training, once ranks are slow."""
        if self._search is not None:
            if self._search.is_alive():
                return False
            return self._gain >= GAIN or self._look(standings)
        return self._look(standings)

    def _look(self, standings: Standings) -> bool:
        slow = self.replanner.slow
        known = {rank: slow[device] for rank, device in enumerate(self.devices) if device in slow}
        if changed := self._looks.changed(standings, known):
            for rank, factor in changed.items():
                self.say(rank, self.devices[rank], factor)
            now = {**slow, **{self.devices[rank]: factor for rank, factor in changed.items()}}
            self.replanner.slow = {device: factor for device, factor in now.items() if factor > 1}
            self._gain = 0.0  # and stays so if there is no plan: it goes on as it is
            self._search = self.replanner.beside(self.left_out, self._find)
        return False

    def _find(self) -> None:
        self._gain = self.replanner.gain(self.left_out, self.found)
